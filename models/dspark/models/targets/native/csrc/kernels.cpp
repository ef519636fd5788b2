// One body of kernels, compiled for each instruction set by its own flags (build.py) and with
// DN_SET as its name. No standard C++ headers: an inline function of theirs compiled here could
// replace the one that other files use, and then run where these instructions do not exist.
#include "kernels.h"

#include <string.h>

#if defined(__x86_64__)
#include <immintrin.h>
#elif defined(__aarch64__)
#include <arm_neon.h>
#endif

namespace {

using namespace dn;

#if defined(__AVX512F__)
constexpr int VL = 16, MR = 8, NV = 2;
#elif defined(__AVX2__)
constexpr int VL = 8, MR = 6, NV = 2;
#else
constexpr int VL = 4, MR = 6, NV = 4;
#endif
typedef float VF __attribute__((vector_size(VL * 4), may_alias));
typedef int32_t VI __attribute__((vector_size(VL * 4), may_alias));
typedef int8_t VB __attribute__((vector_size(VL), may_alias));
constexpr int NR = VL * NV;
constexpr int kLine = 64;  // bytes that come from memory at once

#define INLINE static inline __attribute__((always_inline))

INLINE VF load(const float *p) {
  VF v;
  memcpy(&v, p, sizeof v);
  return v;
}
INLINE void store(float *p, VF v) { memcpy(p, &v, sizeof v); }
INLINE VF all(float x) { return x - VF{}; }

// One rounding where the machine has the instruction, two elsewhere; always the same for a set.
INLINE VF fma(VF a, VF b, VF c) {
#if defined(__AVX512F__)
  return (VF)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__FMA__)
  return (VF)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#elif defined(__aarch64__)
  return (VF)vfmaq_f32((float32x4_t)c, (float32x4_t)a, (float32x4_t)b);
#else
  return a * b + c;
#endif
}

// Pairwise over the lanes, in one fixed tree.
INLINE float sum_lanes(VF v) {
  float t[VL];
  store(t, v);
  for (int w = VL / 2; w; w /= 2)
    for (int i = 0; i < w; i++) t[i] += t[i + w];
  return t[0];
}
INLINE float max_lanes(VF v) {
  float t[VL];
  store(t, v);
  for (int w = VL / 2; w; w /= 2)
    for (int i = 0; i < w; i++) t[i] = t[i] > t[i + w] ? t[i] : t[i + w];
  return t[0];
}

// e^x for x <= 88, relative error below 3e-7; below -87 it stays e^-87, NaN stays NaN.
INLINE VF exp(VF x) {
  x = x < -87.0f ? all(-87.0f) : x;
  const VF whole = fma(x, all(1.44269504f), all(12582912.0f)) - 12582912.0f;  // round to nearest
  VF r = fma(whole, all(-0.693359375f), x);
  r = fma(whole, all(2.12194440e-4f), r);
  VF p = all(1.9875691500e-4f);
  p = fma(p, r, all(1.3981999507e-3f));
  p = fma(p, r, all(8.3334519073e-3f));
  p = fma(p, r, all(4.1665795894e-2f));
  p = fma(p, r, all(1.6666665459e-1f));
  p = fma(p, r, all(5.0000001201e-1f));
  p = fma(p, r * r, r) + 1.0f;
  const VI power = (__builtin_convertvector(whole, VI) + 127) << 23;
  VF scale;
  memcpy(&scale, &power, sizeof scale);
  return p * scale;
}

// --- float16

INLINE uint16_t to_half(float x) {
#if defined(__F16C__)
  return (uint16_t)_cvtss_sh(x, 0);
#elif defined(__aarch64__)
  __fp16 h = (__fp16)x;
  uint16_t bits;
  memcpy(&bits, &h, 2);
  return bits;
#else
  uint32_t u;
  memcpy(&u, &x, 4);
  const uint32_t sign = (u >> 16) & 0x8000u;
  u &= 0x7fffffffu;
  if (u > 0x7f800000u) return (uint16_t)(sign | 0x7e00u);
  if (u >= 0x47800000u) return (uint16_t)(sign | 0x7c00u);
  if (u < 0x38800000u) {  // subnormal: the float adder rounds for us
    float f;
    memcpy(&f, &u, 4);
    f += 0.5f;
    memcpy(&u, &f, 4);
    return (uint16_t)(sign | (u - 0x3f000000u));
  }
  u += 0xfffu + ((u >> 13) & 1);
  return (uint16_t)(sign | ((u - 0x38000000u) >> 13));
#endif
}

INLINE VF load(const uint16_t *p) {
#if defined(__AVX512F__)
  return (VF)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(__F16C__)
  return (VF)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#elif defined(__aarch64__)
  return (VF)vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p)));
#else
  float t[VL];
  for (int i = 0; i < VL; i++) {
    const uint32_t h = p[i], sign = (h & 0x8000u) << 16, rest = h & 0x7fffu;
    uint32_t u = rest >= 0x7c00u ? 0x7f800000u | (rest & 0x3ffu) << 13 : (rest << 13) + 0x38000000u;
    if (rest < 0x400u) {  // subnormal or zero
      const float f = (float)rest * 5.9604644775390625e-8f;
      memcpy(&u, &f, 4);
    }
    u |= sign;
    memcpy(&t[i], &u, 4);
  }
  return load(t);
#endif
}

// --- Products in float32: every output is one sum in the order of the inputs

void pack_f32(const float *w, int n, int k, float *out) {
  for (int i = 0; i < NR; i++)
    for (int j = 0; j < k; j++) out[(long)j * NR + i] = i < n ? w[(long)i * k + j] : 0.0f;
}

// Puts a tile of M rows and NR outputs where it belongs; the last panel may be cut short.
template <int M, int V>
INLINE void put(const Product &p, int row, int column, VF (&acc)[M][V]) {
  float *out = p.out + row * p.ld_out + column;
  if (column + V * VL <= p.n) {
    for (int r = 0; r < M; r++)
      for (int v = 0; v < V; v++) {
        VF y = acc[r][v];
        if (p.bias) y = y + load(p.bias + column + v * VL);
        float *at = out + r * p.ld_out + v * VL;
        if (p.add) y = load(at) + y;
        store(at, y);
      }
    return;
  }
  for (int r = 0; r < M; r++) {
    float t[V * VL];
    for (int v = 0; v < V; v++) store(t + v * VL, acc[r][v]);
    for (int i = 0; column + i < p.n; i++) {
      float y = t[i];
      if (p.bias) y = y + p.bias[column + i];
      float *at = out + r * p.ld_out + i;
      *at = p.add ? *at + y : y;
    }
  }
}

// Rows are cut into tiles of nearly equal height: 13 rows as 7 + 6 and not 12 + 1. A panel comes
// from memory while the one before is multiplied: each of its tiles asks for an equal share.
struct Turn {
  int tile, tiles;
  bool more;
  // This tile's share [begin, end) of so many lines, 0 of them where the rows are so few that the
  // panels come in one stream anyway.
  int begin(int lines) const { return lines * tile / tiles; }
  int end(int lines, bool few) const { return few || !more ? 0 : lines * (tile + 1) / tiles; }
};

template <int M>
void tile_f32(const Product &p, const float *w, int row, int column, Turn turn) {
  VF acc[M][NV] = {};
  const float *x = p.x + (long)row * p.k;
  const long ld = p.k, next = ld * NR;
  constexpr int lines = 16 * NR * 4 / kLine;  // of 16 inputs
  const int begin = turn.begin(lines), end = turn.end(lines, p.rows < 12);
  for (int k = 0; k < p.k;) {
    const int stop = k + 16 < p.k ? k + 16 : p.k;
    for (int i = begin; i < end; i++) __builtin_prefetch(w + next + i * (kLine / 4), 0, 2);
    for (; k < stop; k++, x++, w += NR) {
      VF b[NV];
#pragma GCC unroll 16
      for (int v = 0; v < NV; v++) b[v] = load(w + v * VL);
      const float *at = x;
#pragma GCC unroll 16
      for (int r = 0; r < M; r++) {
        const VF a = all(at[(r % 3) * ld]);
        if (r % 3 == 2) at += 3 * ld;
#pragma GCC unroll 16
        for (int v = 0; v < NV; v++) acc[r][v] = fma(a, b[v], acc[r][v]);
      }
    }
  }
  put<M, NV>(p, row, column, acc);
}

template <int M>
INLINE void rest_f32(const Product &p, const float *w, int row, int rows, int column, Turn turn) {
  if constexpr (M > 0) {
    if (rows == M) return tile_f32<M>(p, w, row, column, turn);
    rest_f32<M - 1>(p, w, row, rows, column, turn);
  }
}

INLINE int tiles_of(int rows, int height) { return (rows + height - 1) / height; }

void multiply_f32(const Product &p, int begin, int end, int last) {
  for (int panel = begin; panel < end; panel++) {
    const float *w = (const float *)p.weight + (long)panel * NR * p.k;
    const int tiles = tiles_of(p.rows, MR);
    for (int t = 0, row = 0; t < tiles; t++) {
      const int rows = (p.rows - row + tiles - t - 1) / (tiles - t);
      rest_f32<MR>(p, w, row, rows, panel * NR, {t, tiles, panel + 1 < last});
      row += rows;
    }
  }
}

// --- Products in int8: exact sums inside a group, then float32 over the groups in order

#if defined(__AVX512VNNI__) || defined(__AVXVNNI__) || defined(__AVX2__)
#define DN_INT8_X86 1
#endif

#if DN_INT8_X86
#if defined(__AVX512VNNI__)
constexpr int MR8 = 6, NV8 = 2;
typedef __m512i VQ;
INLINE VQ load_q(const void *p) { return _mm512_loadu_si512(p); }
INLINE VQ four(const int8_t *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm512_set1_epi32(x);
}
INLINE VQ all_q(int32_t x) { return _mm512_set1_epi32(x); }
INLINE VF to_float(VQ x) { return (VF)_mm512_cvtepi32_ps(x); }
INLINE VF scales(const uint16_t *p) {
  return (VF)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)p)), 16);
}
// By hand: around the intrinsic GCC 12 moves every sum twice.
INLINE VQ dot(VQ acc, VQ w, VQ x) {
  asm("vpdpbusd %2, %1, %0" : "+v"(acc) : "v"(w), "v"(x));
  return acc;
}
#else
constexpr int NV8 = 2;
typedef __m256i VQ;
INLINE VQ load_q(const void *p) { return _mm256_loadu_si256((const __m256i *)p); }
INLINE VQ four(const int8_t *p) {
  int32_t x;
  memcpy(&x, p, 4);
  return _mm256_set1_epi32(x);
}
INLINE VQ all_q(int32_t x) { return _mm256_set1_epi32(x); }
INLINE VF to_float(VQ x) { return (VF)_mm256_cvtepi32_ps(x); }
INLINE VF scales(const uint16_t *p) {
  return (VF)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i *)p)), 16);
}
#if defined(__AVXVNNI__)
constexpr int MR8 = 3;
INLINE VQ dot(VQ acc, VQ w, VQ x) {
  asm("%{vex%} vpdpbusd %2, %1, %0" : "+x"(acc) : "x"(w), "x"(x));
  return acc;
}
#else
constexpr int MR8 = 2;
// Pairs in 16 bits, since maddubs saturates: even inputs, then odd ones.
INLINE VQ dot(VQ acc, VQ w, VQ x) {
  const VQ even = _mm256_madd_epi16(_mm256_and_si256(w, _mm256_set1_epi16(255)),
                                    _mm256_srai_epi16(_mm256_slli_epi16(x, 8), 8));
  const VQ odd = _mm256_madd_epi16(_mm256_srli_epi16(w, 8), _mm256_srai_epi16(x, 8));
  return _mm256_add_epi32(acc, _mm256_add_epi32(even, odd));
}
#endif
#endif

template <int M>
void tile_i8(const Product &p, const uint8_t *panel, int row, int column, int part, Turn turn) {
  VF acc[M][NV8] = {};
  const Int8Rows &a = p.rows8;
  const long ld = (long)a.groups * kGroup;
  const int8_t *x = a.q + row * ld;
  const float *scale = a.scale + (long)row * a.groups;
  const int32_t *minus = a.minus128 + (long)row * a.groups;
  const long next = (long)a.groups * kInt8Record;
  constexpr int lines = kInt8Record / kLine;
  const int begin = turn.begin(lines), end = turn.end(lines, p.rows < 4);
  for (int g = 0; g < a.groups; g++, panel += kInt8Record) {
    VQ sum[M][NV8];
#pragma GCC unroll 16
    for (int r = 0; r < M; r++)
#pragma GCC unroll 4
      for (int v = 0; v < NV8; v++) sum[r][v] = all_q(minus[(long)r * a.groups + g]);
    for (int i = begin; i < end && part == 0; i++)
      __builtin_prefetch(panel + next + i * kLine, 0, 2);
    const uint8_t *w = panel + part * 4 * VL * NV8;
#pragma GCC unroll 4
    for (int k = 0; k < kGroup / 4; k++, x += 4, w += 4 * kInt8Panel) {
      VQ b[NV8];
#pragma GCC unroll 4
      for (int v = 0; v < NV8; v++) b[v] = load_q(w + v * 4 * VL);
      const int8_t *at = x;
#pragma GCC unroll 16
      for (int r = 0; r < M; r++) {
        const VQ four_inputs = four(at + (r % 3) * ld);
        if (r % 3 == 2) at += 3 * ld;
#pragma GCC unroll 4
        for (int v = 0; v < NV8; v++) sum[r][v] = dot(sum[r][v], b[v], four_inputs);
      }
    }
    const uint16_t *s = (const uint16_t *)(panel + kGroup * kInt8Panel) + part * VL * NV8;
#pragma GCC unroll 4
    for (int v = 0; v < NV8; v++) {
      const VF of_weights = scales(s + v * VL);
#pragma GCC unroll 16
      for (int r = 0; r < M; r++)
        acc[r][v] = fma(to_float(sum[r][v]) * of_weights, all(scale[(long)r * a.groups + g]),
                        acc[r][v]);
    }
  }
  put<M, NV8>(p, row, column + part * VL * NV8, acc);
}
constexpr int kParts = kInt8Panel / (VL * NV8);
#else
constexpr int MR8 = 4, kParts = 1;

template <int M>
void tile_i8(const Product &p, const uint8_t *panel, int row, int column, int, Turn) {
  constexpr int V = kInt8Panel / VL;
  VF acc[M][V] = {};
  const Int8Rows &a = p.rows8;
  const long ld = (long)a.groups * kGroup;
  for (int g = 0; g < a.groups; g++, panel += kInt8Record) {
    int32_t sum[M][kInt8Panel];
    for (int r = 0; r < M; r++)
      for (int i = 0; i < kInt8Panel; i++) sum[r][i] = a.minus128[(row + r) * (long)a.groups + g];
    for (int k = 0; k < kGroup / 4; k++) {
      const uint8_t *w = panel + k * 4 * kInt8Panel;
      for (int r = 0; r < M; r++) {
        const int8_t *x = a.q + (row + r) * ld + g * kGroup + 4 * k;
        for (int i = 0; i < kInt8Panel; i++)
          sum[r][i] += w[4 * i] * x[0] + w[4 * i + 1] * x[1] + w[4 * i + 2] * x[2] +
                       w[4 * i + 3] * x[3];
      }
    }
    const uint16_t *s = (const uint16_t *)(panel + kGroup * kInt8Panel);
    for (int v = 0; v < V; v++) {
      VI bits;
      for (int i = 0; i < VL; i++) bits[i] = (int32_t)((uint32_t)s[v * VL + i] << 16);
      VF of_weights;
      memcpy(&of_weights, &bits, sizeof bits);
      for (int r = 0; r < M; r++) {
        VI whole;
        memcpy(&whole, &sum[r][v * VL], sizeof whole);
        acc[r][v] = fma(__builtin_convertvector(whole, VF) * of_weights,
                        all(a.scale[(row + r) * (long)a.groups + g]), acc[r][v]);
      }
    }
  }
  put<M, V>(p, row, column, acc);
}
#endif

template <int M>
INLINE void rest_i8(const Product &p, const uint8_t *w, int row, int rows, int column, int part,
                    Turn turn) {
  if constexpr (M > 0) {
    if (rows == M) return tile_i8<M>(p, w, row, column, part, turn);
    rest_i8<M - 1>(p, w, row, rows, column, part, turn);
  }
}

void multiply_i8(const Product &p, int begin, int end, int last) {
  for (int panel = begin; panel < end; panel++) {
    const uint8_t *w = (const uint8_t *)p.weight + (long)panel * p.rows8.groups * kInt8Record;
    const int tiles = tiles_of(p.rows, MR8);
    for (int t = 0, row = 0; t < tiles; t++) {
      const int rows = (p.rows - row + tiles - t - 1) / (tiles - t);
      for (int part = 0; part < kParts; part++)
        if (panel * kInt8Panel + part * (kInt8Panel / kParts) < p.n)
          rest_i8<MR8>(p, w, row, rows, panel * kInt8Panel, part, {t, tiles, panel + 1 < last});
      row += rows;
    }
  }
}

// --- Rows

void norm(const float *x, const float *weight, float eps, int n, float *out) {
  VF squares = {};
  float tail = 0.0f;
  int i = 0;
  for (; i + VL <= n; i += VL) {
    const VF v = load(x + i);
    squares = fma(v, v, squares);
  }
  for (; i < n; i++) tail += x[i] * x[i];
  const float scale = 1.0f / __builtin_sqrtf((sum_lanes(squares) + tail) / (float)n + eps);
  for (i = 0; i + VL <= n; i += VL) store(out + i, load(x + i) * scale * load(weight + i));
  for (; i < n; i++) out[i] = x[i] * scale * weight[i];
}

// A group with a number that is not finite gets the scale NaN: its outputs are NaN, not wrong.
void quantise(const float *x, int k, int8_t *q, float *scale, int32_t *minus128) {
  const int groups = (k + kGroup - 1) / kGroup;
  for (int g = 0; g < groups; g++, q += kGroup) {
    float part[kGroup];
    const float *values = x + g * kGroup;
    if ((g + 1) * kGroup > k) {
      for (int i = 0; i < kGroup; i++) part[i] = g * kGroup + i < k ? values[i] : 0.0f;
      values = part;
    }
    VF most = {}, odd = {};
    for (int i = 0; i < kGroup; i += VL) {
      const VF v = load(values + i), size = v < 0.0f ? -v : v;
      most = size > most ? size : most;
      odd = odd + v * 0.0f;
    }
    const float largest = max_lanes(most), finite = sum_lanes(odd);
    if (finite != 0.0f || !(largest > 1e-30f)) {
      memset(q, 0, kGroup);
      scale[g] = finite != 0.0f ? __builtin_nanf("") : 0.0f;
      minus128[g] = 0;
      continue;
    }
    const float up = 127.0f / largest;
    scale[g] = largest / 127.0f;
    int32_t total = 0;
    VI sums = {};
    for (int i = 0; i < kGroup; i += VL) {
      const VF whole = fma(load(values + i), all(up), all(12582912.0f)) - 12582912.0f;
      const VI n = __builtin_convertvector(whole, VI);
      sums += n;
      const VB narrow = __builtin_convertvector(n, VB);
      memcpy(q + i, &narrow, sizeof narrow);
    }
    for (int j = 0; j < VL; j++) total += sums[j];
    minus128[g] = -128 * total;
  }
}

INLINE VF silu(VF g, VF u) {
  const VF minus = g < -88.0f ? all(88.0f) : -g;
  return g / (exp(minus) + 1.0f) * u;
}

void gate(const float *g, const float *u, int n, float *out) {
  int i = 0;
  for (; i + VL <= n; i += VL) store(out + i, silu(load(g + i), load(u + i)));
  if (i < n) {
    float a[VL] = {}, b[VL] = {}, y[VL];
    memcpy(a, g + i, sizeof(float) * (n - i));
    memcpy(b, u + i, sizeof(float) * (n - i));
    store(y, silu(load(a), load(b)));
    memcpy(out + i, y, sizeof(float) * (n - i));
  }
}

void rotate(float *head, const float *cos, const float *sin, int head_dim) {
  const int half = head_dim / 2;
  int i = 0;
  for (; i + VL <= half; i += VL) {
    const VF a = load(head + i), b = load(head + half + i), c = load(cos + i), s = load(sin + i);
    store(head + i, a * c - b * s);
    store(head + half + i, b * c + a * s);
  }
  for (; i < half; i++) {
    const float a = head[i], b = head[half + i];
    head[i] = a * cos[i] - b * sin[i];
    head[half + i] = b * cos[i] + a * sin[i];
  }
}

INLINE void keep(float x, float *at) { *at = x; }
INLINE void keep(float x, uint16_t *at) { *at = to_half(x); }

template <class T>
INLINE void store_as(const float *key, const float *value, int head_dim, int block_size, int slot,
                     T *keys, T *values) {
  for (int d = 0; d < head_dim; d++) keep(key[d], keys + (long)d * block_size + slot);
  for (int d = 0; d < head_dim; d++) keep(value[d], values + (long)slot * head_dim + d);
}

void store_kv(const float *key, const float *value, int head_dim, int block_size, int slot,
              bool half, void *keys, void *values) {
  if (half)
    store_as(key, value, head_dim, block_size, slot, (uint16_t *)keys, (uint16_t *)values);
  else
    store_as(key, value, head_dim, block_size, slot, (float *)keys, (float *)values);
}

// --- Attention: one partition of keys at a time, lanes are keys for scores and sizes for values

constexpr int KU = VL == 8 ? 2 : 4;  // vectors of keys in flight
constexpr int QU = 4;                // queries in flight

template <class T>
INLINE const T *key_at(const Attention &a, const int32_t *table, int kv_head, int t) {
  const long block = table[t / a.block_size];
  return (const T *)a.keys + (block * a.kv_heads + kv_head) * a.head_dim * a.block_size +
         t % a.block_size;
}
template <class T>
INLINE const T *key_at(const Attention &a, int t) { return key_at<T>(a, a.table, a.kv_head, t); }

template <class T>
INLINE const T *value_at(const Attention &a, int t) {
  const long block = a.table[t / a.block_size];
  return (const T *)a.values +
         ((block * a.kv_heads + a.kv_head) * a.block_size + t % a.block_size) * a.head_dim;
}

// Blocks lie anywhere, so the processor's own prefetching starts anew with each: memory is asked
// for by hand, values while keys are read and the next keys while values are. values: of the same
// keys, or NULL.
template <class T, int Q, int K>
INLINE void score_vectors(const Attention &a, const Query *queries, const T *const *at, long ld,
                          const T *const *values, float *scores) {
  constexpr int line = kLine / (VL * (int)sizeof(T)) > 1 ? kLine / (VL * (int)sizeof(T)) : 1;
  VF s[Q][K] = {};
#pragma GCC unroll 4
  for (int d = 0; d < a.head_dim; d++) {
    VF k[K];
    if (values && d % line == 0)
#pragma GCC unroll 4
      for (int v = 0; v < K; v++) __builtin_prefetch(values[v] + d * VL, 0, 2);
#pragma GCC unroll 4
    for (int v = 0; v < K; v++) k[v] = load(at[v] + d * ld);
#pragma GCC unroll 4
    for (int j = 0; j < Q; j++) {
      const VF q = all(queries[j].q[d]);
#pragma GCC unroll 4
      for (int v = 0; v < K; v++) s[j][v] = fma(q, k[v], s[j][v]);
    }
  }
  for (int j = 0; j < Q; j++)
    for (int v = 0; v < K; v++) store(scores + j * kPartition + v * VL, s[j][v] * a.scale);
}

// Scores of keys [first, last) of the partition at `base`; both are made whole vectors.
template <class T, int Q>
INLINE void score(const Attention &a, const Query *queries, int base, int first, int last,
                  float *scores, float *tile) {
  int t = first / VL * VL;
  if (a.block_size % VL == 0) {
    const int known = (last + VL - 1) / VL * VL;
    for (; t + KU * VL <= known; t += KU * VL) {
      const T *at[KU], *values[KU];
      for (int v = 0; v < KU; v++) at[v] = key_at<T>(a, t + v * VL);
      for (int v = 0; v < KU; v++) values[v] = value_at<T>(a, t + v * VL);
      score_vectors<T, Q, KU>(a, queries, at, a.block_size, values, scores + t - base);
    }
    for (; t < known; t += VL) {
      const T *at = key_at<T>(a, t), *values = value_at<T>(a, t);
      score_vectors<T, Q, 1>(a, queries, &at, a.block_size, &values, scores + t - base);
    }
    return;
  }
  for (; t < last; t += VL) {  // blocks smaller than a vector: gather keys side by side
    T *beside = (T *)tile;
    for (int i = 0; i < VL; i++) {
      const T *at = key_at<T>(a, t + i < last ? t + i : last - 1);
      for (int d = 0; d < a.head_dim; d++) beside[d * VL + i] = at[(long)d * a.block_size];
    }
    const T *from = beside;
    score_vectors<T, Q, 1>(a, queries, &from, VL, nullptr, scores + t - base);
  }
}

// next: the vectors of keys that are read after this partition, or NULL.
template <class T, int Q, int D>
INLINE void weigh(const Attention &a, const float *weights, int base, int begin, int end, int from,
                  const T *const *next, float *partial) {
  const int ld = a.head_dim + 2;
  VF sum[Q][D];
#pragma GCC unroll 4
  for (int j = 0; j < Q; j++)
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) sum[j][v] = load(partial + j * ld + from + v * VL);
  const int rows = a.head_dim / VL, size = a.block_size * (int)sizeof(T);
  const int hop = size < kLine ? kLine / size : 1;  // rows of keys in a line
  const int stretch = next ? VL : a.block_size;     // keys that lie side by side
  for (int t = begin; t < end;) {
    const int stop = (t / stretch + 1) * stretch, until = stop < end ? stop : end;
    const T *at = value_at<T>(a, t) + from, *ahead = nullptr;
    if (next) ahead = next[(t - base) / VL] + (long)(t % VL) * rows * a.block_size;
    for (; t < until; t++, at += a.head_dim) {
      VF x[D];
      if (next) {
        for (int i = 0; i < rows; i += hop) __builtin_prefetch(ahead + i * a.block_size, 0, 2);
        ahead += rows * a.block_size;
      }
#pragma GCC unroll 4
      for (int v = 0; v < D; v++) x[v] = load(at + v * VL);
#pragma GCC unroll 4
      for (int j = 0; j < Q; j++) {
        const VF w = all(weights[j * kPartition + t - base]);
#pragma GCC unroll 4
        for (int v = 0; v < D; v++) sum[j][v] = fma(w, x[v], sum[j][v]);
      }
    }
  }
#pragma GCC unroll 4
  for (int j = 0; j < Q; j++)
#pragma GCC unroll 4
    for (int v = 0; v < D; v++) store(partial + j * ld + from + v * VL, sum[j][v]);
}

template <class T, int Q>
INLINE void weigh_all(const Attention &a, const float *weights, int base, int begin, int end,
                      const T *const *next, float *partial) {
  if (begin >= end) return;
  int d = 0;
  for (; d + KU * VL <= a.head_dim; d += KU * VL)
    weigh<T, Q, KU>(a, weights, base, begin, end, d, d ? nullptr : next, partial);
  for (; d < a.head_dim; d += VL)
    weigh<T, Q, 1>(a, weights, base, begin, end, d, d ? nullptr : next, partial);
}

// Where the keys of the next partition lie; false if there is none or blocks are below a vector.
template <class T>
INLINE bool look_ahead(const Attention &a, const T *(&next)[kPartition / VL]) {
  const Attention::Next &to = a.next;
  const int base = to.partition * kPartition;
  if (!to.table || a.block_size % VL || base >= to.length) return false;
  for (int i = 0; i < kPartition / VL; i++) {
    const int t = base + i * VL;
    next[i] = t < to.length ? key_at<T>(a, to.table, to.kv_head, t) : next[i - 1];
  }
  return true;
}

template <class T, int Q>
void attend_few(const Attention &a, const Query *queries, int partition, float *scratch,
                float *partial) {
  const int base = partition * kPartition, ld = a.head_dim + 2;
  float *scores = scratch, *tile = scratch + QU * kPartition;
  int begin[Q], end[Q], first = base + kPartition, last = 0, latest = base, earliest = 1 << 30;
  for (int j = 0; j < Q; j++) {
    const int low = a.window ? queries[j].index - a.window + 1 : 0;
    begin[j] = low > base ? low : base;
    end[j] = queries[j].index + 1 < base + kPartition ? queries[j].index + 1 : base + kPartition;
    start_merge(partial + j * ld, a.head_dim);
    if (begin[j] >= end[j]) end[j] = begin[j] = base;  // sees nothing here
    else {
      if (begin[j] < first) first = begin[j];
      if (end[j] > last) last = end[j];
    }
    if (begin[j] > latest) latest = begin[j];
    if (end[j] < earliest) earliest = end[j];
  }
  if (first >= last) return;
  score<T, Q>(a, queries, base, first, last, scores, tile);
  VI lanes;
  for (int i = 0; i < VL; i++) lanes[i] = i;
  for (int j = 0; j < Q; j++) {
    if (begin[j] >= end[j]) continue;
    float *s = scores + j * kPartition;
    VF most = all(-__builtin_inff()), weight = {};
    const int from = (begin[j] - base) / VL * VL;
    for (int t = from; t < end[j] - base; t += VL) {
      const VI key = lanes + (base + t);
      VF x = load(s + t);
      x = key < begin[j] ? all(-__builtin_inff()) : key >= end[j] ? all(-__builtin_inff()) : x;
      store(s + t, x);
      most = x > most ? x : most;
    }
    const float top = max_lanes(most);
    for (int t = from; t < end[j] - base; t += VL) {
      const VI key = lanes + (base + t);
      VF x = exp(load(s + t) - top);
      x = key < begin[j] ? VF{} : key >= end[j] ? VF{} : x;
      store(s + t, x);
      weight = weight + x;
    }
    partial[j * ld + a.head_dim] = top;
    partial[j * ld + a.head_dim + 1] = sum_lanes(weight);
  }
  const T *ahead[kPartition / VL], *const *next = look_ahead(a, ahead) ? ahead : nullptr;
  // Each query adds its values in the order of the keys. What all see is done together; a value
  // that a query must not see is never touched, not even times zero: it may be NaN.
  if (Q > 1 && latest < earliest) {
    for (int j = 0; j < Q; j++)
      weigh_all<T, 1>(a, scores + j * kPartition, base, begin[j], latest, nullptr,
                      partial + j * ld);
    weigh_all<T, Q>(a, scores, base, latest, earliest, next, partial);
    for (int j = 0; j < Q; j++)
      weigh_all<T, 1>(a, scores + j * kPartition, base, earliest, end[j], nullptr,
                      partial + j * ld);
  } else {
    for (int j = 0; j < Q; j++)
      weigh_all<T, 1>(a, scores + j * kPartition, base, begin[j], end[j], next,
                      partial + j * ld);
  }
}

template <class T>
void attend_as(Attention a, const Query *queries, int count, int partition, float *scratch,
               float *partial) {
  const int ld = a.head_dim + 2;
  for (int j = 0; j < count; a.next.table = nullptr) {
    const int left = count - j;
    const Query *q = queries + j;
    float *p = partial + (long)j * ld;
    if (left >= 4 && left != 5 && left != 6) attend_few<T, 4>(a, q, partition, scratch, p), j += 4;
    else if (left >= 3) attend_few<T, 3>(a, q, partition, scratch, p), j += 3;
    else if (left == 2) attend_few<T, 2>(a, q, partition, scratch, p), j += 2;
    else attend_few<T, 1>(a, q, partition, scratch, p), j += 1;
  }
}

void attend(const Attention &a, const Query *queries, int count, int partition, bool half,
            float *scratch, float *partial) {
  if (half)
    attend_as<uint16_t>(a, queries, count, partition, scratch, partial);
  else
    attend_as<float>(a, queries, count, partition, scratch, partial);
}

void merge(float *into, const float *partial, int head_dim) {
  const float theirs = partial[head_dim], ours = into[head_dim];
  if (theirs == -__builtin_inff() && partial[head_dim + 1] == 0.0f) return;
  const float top = theirs > ours ? theirs : ours;
  VF t = {};
  t[0] = ours - top;
  t[1] = theirs - top;
  t = exp(t);
  const float keep_ours = into[head_dim + 1] == 0.0f ? 0.0f : t[0], add = t[1];
  for (int d = 0; d < head_dim; d += VL)
    store(into + d, fma(load(partial + d), all(add), load(into + d) * keep_ours));
  into[head_dim] = top;
  into[head_dim + 1] = into[head_dim + 1] * keep_ours + partial[head_dim + 1] * add;
}

void finish(const float *merged, int head_dim, float *out) {
  const float scale = 1.0f / merged[head_dim + 1];
  for (int d = 0; d < head_dim; d += VL) store(out + d, load(merged + d) * scale);
}

// --- The machine's limits

float read(const void *from, long bytes) {
  const float *p = (const float *)from;
  VI sum[8] = {};
  for (long i = 0; i + 8 * VL <= bytes / 4; i += 8 * VL)
    for (int v = 0; v < 8; v++) {
      VI x;
      memcpy(&x, p + i + v * VL, sizeof x);
      sum[v] ^= x;
    }
  for (int v = 1; v < 8; v++) sum[0] ^= sum[v];
  return (float)sum[0][0];
}

long churn(bool int8, long turns, float *sink) {
  constexpr int chains = 12;
#if DN_INT8_X86
  if (int8) {
    VQ sum[chains], x = all_q(0x01010101);
    for (int i = 0; i < chains; i++) sum[i] = all_q(i);
    for (long t = 0; t < turns; t++) {
#pragma GCC unroll 16
      for (int i = 0; i < chains; i++) sum[i] = dot(sum[i], x, x);
      asm volatile("" : "+x"(x));  // or it would be computed once
    }
    for (int i = 0; i < chains; i++) *sink += to_float(sum[i])[0];
    return turns * chains * VL * 4;
  }
#endif
  VF sum[chains], x = all(0.5f);
  for (int i = 0; i < chains; i++) sum[i] = all((float)i);
  for (long t = 0; t < turns; t++) {
#pragma GCC unroll 16
    for (int i = 0; i < chains; i++) sum[i] = fma(sum[i], x, x);
#if defined(__x86_64__)
    asm volatile("" : "+x"(x));
#else
    asm volatile("" : "+w"(x));
#endif
  }
  for (int i = 0; i < chains; i++) *sink += sum[i][0];
  return turns * chains * VL;
}

}  // namespace

#define DN_NAME2(set) dn_kernels_##set
#define DN_NAME(set) DN_NAME2(set)
#define DN_TEXT2(set) #set
#define DN_TEXT(set) DN_TEXT2(set)

extern "C" const dn::Kernels *DN_NAME(DN_SET)() {
  static const dn::Kernels kernels = {
      DN_TEXT(DN_SET), NR,   pack_f32, multiply_f32, multiply_i8, norm,   quantise,
      gate,            rotate, store_kv, attend,       merge,       finish,   read,  churn,
  };
  return &kernels;
}
