import pytest

from moechat.errors import ArchitectureUnsupported
from moechat.models.config_reader import ConfigReader


def test_an_alias_stands_in_for_its_key_or_repeats_it():
    read = ConfigReader({"other": 3})
    read.alias("other", "key")
    assert read.integer("key", 1, 9) == 3
    read.finish()
    ConfigReader({"other": 3, "key": 3}).alias("other", "key")
    with pytest.raises(ArchitectureUnsupported, match="other = 3: key says 4"):
        ConfigReader({"other": 3, "key": 4}).alias("other", "key")


def test_an_alias_does_not_change_the_callers_config():
    config = {"other": 3}
    ConfigReader(config).alias("other", "key")
    assert config == {"other": 3}


def test_null_is_there_but_has_no_value():
    read = ConfigReader({"key": None})
    assert read.mentions("key") and not read.has("key") and not read.mentions("other")
    read.finish()


def test_a_default_need_not_be_within_the_bounds_but_a_value_must():
    assert ConfigReader({}).number("key", 1.0, 2.0, default=0.0) == 0.0
    assert ConfigReader({"key": None}).integer("key", 1, 2, default=0) == 0
    with pytest.raises(ArchitectureUnsupported, match="key = 0"):
        ConfigReader({"key": 0}).integer("key", 1, 2, default=0)


@pytest.mark.parametrize("value", [3, "full", ["other"], [["full"]], [{}], [None]])
def test_lists_of_strings_are_checked(value):
    with pytest.raises(ArchitectureUnsupported, match="key = "):
        ConfigReader({"key": value}).texts("key", "full", "sliding")


@pytest.mark.parametrize("value", [3, [1.0], [True], [-1], [10], ["1"], {}])
def test_lists_of_integers_are_checked(value):
    with pytest.raises(ArchitectureUnsupported, match="key = "):
        ConfigReader({"key": value}).integers("key", 0, 9)


def test_only_without_values_refuses_all_but_null():
    ConfigReader({"key": None}).only("key")
    with pytest.raises(ArchitectureUnsupported, match="key = 1: it is not implemented"):
        ConfigReader({"key": 1}).only("key")


def test_only_compares_types_also_of_unhashable_values():
    ConfigReader({"key": {}}).only("key", {})
    with pytest.raises(ArchitectureUnsupported):
        ConfigReader({"key": {"x": 1}}).only("key", {})
    with pytest.raises(ArchitectureUnsupported):
        ConfigReader({"key": True}).only("key", 1)
