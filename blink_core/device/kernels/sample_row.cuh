// What the sampler reads of a row; written by step_view.cu.
#pragma once

// How one row's token is chosen, in device memory. Field meanings are those of abi Sampling.
struct SampleRow {
  unsigned long long seed;
  unsigned long long owner;  // whose penalty counts: unique for a request, never 0
  const int* tokens;  // prompt and output
  const int2* bias;  // {id, float bits}
  const unsigned* mask;   // bit i allows id i; null allows all
  float temperature, top_p, min_p, repetition, presence, frequency;
  unsigned top_k, choice, position, logprobs;
  unsigned prompt_len, n_tokens, n_bias, n_barred;
  unsigned row;  // of the penalty counts
  unsigned out;  // index of its result
  int barred[16];
};
static_assert(sizeof(SampleRow) == 168);
