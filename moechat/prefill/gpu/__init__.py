"""Stream-loading prefill: a layer's weights come to the device, all tokens pass, the next comes."""
