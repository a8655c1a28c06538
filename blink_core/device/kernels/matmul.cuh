// Arguments and epilogue of the own matrix products.
#pragma once

#include "common.cuh"

// One product: out = x weight^T (+ bias) (+ residual), or silu(gate) * up of it; or one for each expert of a mixture.
struct MatmulParams {
  const T* weight;    // [n, k]; [2 * n, k] with silu: gate rows first; [experts, ...] when grouped
  const T* x;         // [rows, k]
  void* out;          // [rows, n] of T, or of float if out_float
  const T* bias;      // [n] (or [2 * n]) or null
  const T* residual;  // [rows, n] or null: added; may be `out`
  int rows, n, k, out_float;
  // Grouped: rows sorted by expert, in blocks of at most the kernel's rows.
  const int* n_blocks;
  const int4* blocks;  // {expert, first sorted row, rows, 0}
  const int* gather;   // row of x of each sorted row, or null for the sorted row itself
  const int* scatter;  // row of out of each sorted row, or null
};

DEVICE void store(const MatmulParams& p, i64 row, int column, float value) {
  const i64 at = row * p.n + column;
  if (p.residual != nullptr) value += to_float(p.residual[at]);
  if (p.out_float) {
    static_cast<float*>(p.out)[at] = value;
  } else {
    static_cast<T*>(p.out)[at] = from_float<T>(value);
  }
}
