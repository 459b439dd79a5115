#include "kernels/matmul/block_amx.h"
#include "kernels/peak/peak.h"

namespace moechat {

int64_t dot_peak_amx(int64_t iterations) {
  const matmul_amx::TileRegisters registers;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  _tile_zero(4);
  _tile_zero(5);
  _tile_zero(6);
  _tile_zero(7);
  for (int64_t i = 0; i < iterations; ++i) {
    _tile_dpbf16ps(0, 4, 6);
    _tile_dpbf16ps(1, 4, 7);
    _tile_dpbf16ps(2, 5, 6);
    _tile_dpbf16ps(3, 5, 7);
  }
  return iterations * 4 * kTileRows * kTileRows * kTileCols * 2;
}

}  // namespace moechat
