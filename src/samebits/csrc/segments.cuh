// Positions sorted by the table row they use, in tiles of 256: what sums over the positions of a table row go by.
//
// `order` holds positions by row, ascending within a row; `bounds` for each row its first place in `order` and its first tile.
// Both come from the caller's side of the launch and are checked before anything is read by them. The checks of all tiles and
// of all rows together (tile_at, position_at, tiles_of_row) leave no order and bounds but those of the index:
// bounds cut the places into one range per row; a row's range holds positions of that row only, ascending, so none twice; and
// as there are as many places as positions, none is missing.
#pragma once
#include "guard.cuh"

constexpr int TILE = 256;

struct Segments {
  const i64* index;
  i64 index_step;  // elements from one position to the next; so for the next two
  const i64* order;
  i64 order_step;
  const i64* bounds;
  i64 bounds_step;
  i64 rows;       // of the table
  i64 positions;
};

__device__ __forceinline__ i64 first_place(const Segments& s, i64 row) {
  return row < s.rows ? s.bounds[row * s.bounds_step] : s.positions;
}
__device__ __forceinline__ i64 first_tile(const Segments& s, i64 row) { return s.bounds[row * s.bounds_step + 1]; }

// Places begin .. begin + count - 1 of `order`, all of table row `row`. count is 0 past the last tile.
struct Tile {
  i64 row, begin;
  int count;
};

// The tile-th tile of all. Every lane of the calling warp must take part; each gets the answer. A warp narrows the range of
// rows to a 32nd at every step.
__device__ __forceinline__ Tile tile_at(const Segments& s, i64 tile) {
  const int lane = threadIdx.x % 32;
  i64 low = 0, high = s.rows;  // the row is in low .. high - 1
  for (;;) {
    const i64 step = (high - low + 31) / 32, probe = low + lane * step;
    const unsigned begun = __ballot_sync(0xffffffffu, probe < high && first_tile(s, probe) <= tile);
    require(begun & 1u, "samebits: bounds begin with tile 0");
    const int last = 31 - __clz(begun);
    low += last * step;
    high = low + step < high ? low + step : high;
    if (step == 1) break;
  }
  const i64 first = first_place(s, low), end = first_place(s, low + 1), skipped = tile - first_tile(s, low);
  require(0 <= first && first <= end && end <= s.positions, "samebits: bounds ascend from 0 to the number of positions");
  const i64 left = end - first - skipped * TILE;
  if (skipped < 0 || skipped > s.positions / TILE || left <= 0) return {low, 0, 0};
  return {low, first + skipped * TILE, (int)(left < TILE ? left : TILE)};
}

// The position at one place of a tile.
__device__ __forceinline__ i64 position_at(const Segments& s, const Tile& tile, int place) {
  const i64 at = tile.begin + place, position = s.order[at * s.order_step];
  require((unsigned long long)position < (unsigned long long)s.positions, "samebits: order holds positions");
  require(s.index[position * s.index_step] == tile.row, "samebits: order holds the positions of its table row");
  const bool first = at == first_place(s, tile.row);
  require(first || s.order[(at - 1) * s.order_step] < position, "samebits: order ascends within a table row");
  return position;
}

// First tile of a row, and how many it has. `most` is the number of tiles there are partials for.
struct RowTiles {
  i64 first, count;
};

__device__ __forceinline__ RowTiles tiles_of_row(const Segments& s, i64 row, i64 most) {
  const i64 first = first_place(s, row), end = first_place(s, row + 1), tile = first_tile(s, row);
  require(row > 0 || (first == 0 && tile == 0), "samebits: bounds begin with position 0 and tile 0");
  require(0 <= first && first <= end && end <= s.positions, "samebits: bounds ascend from 0 to the number of positions");
  const i64 count = (end - first + TILE - 1) / TILE;
  require(0 <= tile && tile + count <= most, "samebits: bounds count the tiles");
  require(row + 1 == s.rows || first_tile(s, row + 1) == tile + count, "samebits: bounds count the tiles of each row");
  return {tile, count};
}
