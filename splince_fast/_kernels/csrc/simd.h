/* Registers of BYTES bytes. Included once per instruction set, after `kernels.h` and its pragma.

   Nothing else in this folder names a compiler's extension or an intrinsic. Registers:

       D            LANES numbers of float64
       F            numbers of float32, as many as there is room for

   The names of a dtype are chosen by inclusion (`level.inc.c`): T, V (a full register of T), WIDTH
   (its numbers), LOAD and STORE (LANES numbers of T as a D, widened and narrowed), GET and PUT (a
   full register of T), ALL (one number in every lane of a V). */

#ifdef SPLINCE_VECTORS

#define LANES (BYTES / 8)

typedef double D __attribute__((vector_size(BYTES)));
typedef float F __attribute__((vector_size(BYTES)));
typedef int64_t Bits __attribute__((vector_size(BYTES)));
typedef float HalfF __attribute__((vector_size(BYTES / 2)));
/* The same in memory, at any address of a number. */
typedef D UnalignedD __attribute__((aligned(8), may_alias));
typedef F UnalignedF __attribute__((aligned(4), may_alias));
typedef HalfF UnalignedHalfF __attribute__((aligned(4), may_alias));

INLINE D all_f64(double x) { return x - (D){0}; }
INLINE F all_f32(float x) { return x - (F){0}; }
INLINE D get_f64(const double *p) { return *(const UnalignedD *)p; }
INLINE F get_f32(const float *p) { return *(const UnalignedF *)p; }
INLINE void put_f64(double *p, D x) { *(UnalignedD *)p = x; }
INLINE void put_f32(float *p, F x) { *(UnalignedF *)p = x; }

INLINE D widen_f32(const float *p) {
#if defined(SPLINCE_X86) && BYTES == 64
    return (D)_mm512_cvtps_pd(_mm256_loadu_ps(p));
#elif defined(SPLINCE_X86) && BYTES == 32
    return (D)_mm256_cvtps_pd(_mm_loadu_ps(p));
#else
    return __builtin_convertvector(*(const UnalignedHalfF *)p, D);
#endif
}
INLINE void narrow_f32(float *p, D x) {
    *(UnalignedHalfF *)p = __builtin_convertvector(x, HalfF);
}

INLINE D size_of_f64(D x) { return (D)((Bits)x & INT64_MAX); }
INLINE D larger_f64(D a, D b) {
#if defined(SPLINCE_X86) && BYTES == 64
    return (D)_mm512_max_pd((__m512d)a, (__m512d)b);
#elif defined(SPLINCE_X86) && BYTES == 32
    return (D)_mm256_max_pd((__m256d)a, (__m256d)b);
#else
    Bits first = a > b;
    return (D)((first & (Bits)a) | (~first & (Bits)b));
#endif
}
INLINE double lane_f64(D x, int k) { return x[k]; }

/* a b + c, at one rounding where registers are wide: which of two products is rounded is not left
   to the compiler. */
INLINE D multiply_add_f64(D a, D b, D c) {
#if defined(SPLINCE_X86) && BYTES == 64
    return (D)_mm512_fmadd_pd((__m512d)a, (__m512d)b, (__m512d)c);
#elif defined(SPLINCE_X86) && BYTES == 32
    return (D)_mm256_fmadd_pd((__m256d)a, (__m256d)b, (__m256d)c);
#else
    return a * b + c;
#endif
}

/* Stores past the caches, to addresses that are multiples of STREAMED bytes. What is stored later
   may be in memory earlier, until `settle` has run. */
#define STREAMED 16
INLINE void stream_f64(double *p, D x) {
#if defined(SPLINCE_X86) && BYTES == 64
    _mm_stream_pd(p, _mm512_castpd512_pd128((__m512d)x));
    _mm_stream_pd(p + 2, _mm512_extractf64x2_pd((__m512d)x, 1));
    _mm_stream_pd(p + 4, _mm512_extractf64x2_pd((__m512d)x, 2));
    _mm_stream_pd(p + 6, _mm512_extractf64x2_pd((__m512d)x, 3));
#elif defined(SPLINCE_X86) && BYTES == 32
    _mm_stream_pd(p, _mm256_castpd256_pd128((__m256d)x));
    _mm_stream_pd(p + 2, _mm256_extractf128_pd((__m256d)x, 1));
#elif defined(SPLINCE_X86)
    _mm_stream_pd(p, (__m128d)x);
#else
    put_f64(p, x);
#endif
}
INLINE void stream_f32(float *p, D x) {
    HalfF narrow = __builtin_convertvector(x, HalfF);
#if defined(SPLINCE_X86) && BYTES == 64
    _mm_stream_ps(p, _mm256_castps256_ps128((__m256)narrow));
    _mm_stream_ps(p + 4, _mm256_extractf128_ps((__m256)narrow, 1));
#elif defined(SPLINCE_X86) && BYTES == 32
    _mm_stream_ps(p, (__m128)narrow);
#elif defined(SPLINCE_X86)
    long long bits;
    memcpy(&bits, &narrow, sizeof(bits));
    _mm_stream_si64((void *)p, bits);
#else
    *(UnalignedHalfF *)p = narrow;
#endif
}
/* A whole cache line. */
INLINE void stream_line(char *line, const char *from) {
#if defined(SPLINCE_X86) && BYTES == 64
    _mm512_stream_si512((__m512i *)line, _mm512_loadu_si512(from));
#elif defined(SPLINCE_X86) && BYTES == 32
    for (int k = 0; k < LINE; k += 32)
        _mm256_stream_si256((__m256i *)(line + k), _mm256_loadu_si256((const __m256i *)(from + k)));
#elif defined(SPLINCE_X86)
    for (int k = 0; k < LINE; k += 16)
        _mm_stream_si128((__m128i *)(line + k), _mm_loadu_si128((const __m128i *)(from + k)));
#else
    memcpy(line, from, LINE);
#endif
}
INLINE void settle(void) {
#ifdef SPLINCE_X86
    _mm_sfence();
#endif
}

/* --- float16 as its bits --- */

typedef uint32_t FBits __attribute__((vector_size(BYTES)));
typedef uint16_t Halves __attribute__((vector_size(BYTES / 2)));
typedef Halves UnalignedHalves __attribute__((aligned(2), may_alias));

INLINE FBits bits_of(F x) { return (FBits)x; }
INLINE F floats_of(FBits x) { return (F)x; }
INLINE FBits get_halves(const uint16_t *p) {
    return __builtin_convertvector(*(const UnalignedHalves *)p, FBits);
}
INLINE void put_halves(uint16_t *p, FBits x) {
    *(UnalignedHalves *)p = __builtin_convertvector(x, Halves);
}
INLINE int any_bit(FBits x) {
    uint32_t found = 0;
    for (int k = 0; k < BYTES / 4; k++) found |= x[k];
    return found != 0;
}
INLINE float first_float(F x) { return x[0]; }
#define WHERE(condition) ((FBits)(condition))

/* --- transposing --- */

/* Two registers (a, b) of n lanes change places in blocks of s lanes: a keeps its even blocks and
   gets those of b in place of the odd ones; from lane q + s on, b keeps its odd blocks. */
#define LANE(q, s, n) ((q) & (s) ? (n) + (q) - (s) : (q))
#define LANES_2(o, s, n) LANE(0, s, n) + (o), LANE(1, s, n) + (o)
#define LANES_4(o, s, n) LANES_2(o, s, n), LANE(2, s, n) + (o), LANE(3, s, n) + (o)
#define LANES_8(o, s, n) \
    LANES_4(o, s, n), LANE(4, s, n) + (o), LANE(5, s, n) + (o), LANE(6, s, n) + (o), \
        LANE(7, s, n) + (o)
#define LANES_16(o, s, n) \
    LANES_8(o, s, n), LANE(8, s, n) + (o), LANE(9, s, n) + (o), LANE(10, s, n) + (o), \
        LANE(11, s, n) + (o), LANE(12, s, n) + (o), LANE(13, s, n) + (o), \
        LANE(14, s, n) + (o), LANE(15, s, n) + (o)
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, mask, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, mask, ...) __builtin_shuffle(a, b, (mask){__VA_ARGS__})
#endif
#define EXCHANGE(x, V, mask, n, s, LIST) \
    UNROLL(16) \
    for (int p = 0; p < n; p++) \
        if (!(p & s)) { \
            V a = x[p], b = x[p + s]; \
            x[p] = SHUFFLE(a, b, mask, LIST(0, s, n)); \
            x[p + s] = SHUFFLE(a, b, mask, LIST(s, s, n)); \
        }
INLINE void transpose_f64(D *x) {
#if BYTES == 64
    EXCHANGE(x, D, Bits, 8, 1, LANES_8)
    EXCHANGE(x, D, Bits, 8, 2, LANES_8)
    EXCHANGE(x, D, Bits, 8, 4, LANES_8)
#elif BYTES == 32
    EXCHANGE(x, D, Bits, 4, 1, LANES_4)
    EXCHANGE(x, D, Bits, 4, 2, LANES_4)
#else
    EXCHANGE(x, D, Bits, 2, 1, LANES_2)
#endif
}
INLINE void transpose_f32(F *x) {
#if BYTES == 64
    EXCHANGE(x, F, FBits, 16, 1, LANES_16)
    EXCHANGE(x, F, FBits, 16, 2, LANES_16)
    EXCHANGE(x, F, FBits, 16, 4, LANES_16)
    EXCHANGE(x, F, FBits, 16, 8, LANES_16)
#elif BYTES == 32
    EXCHANGE(x, F, FBits, 8, 1, LANES_8)
    EXCHANGE(x, F, FBits, 8, 2, LANES_8)
    EXCHANGE(x, F, FBits, 8, 4, LANES_8)
#else
    EXCHANGE(x, F, FBits, 4, 1, LANES_4)
    EXCHANGE(x, F, FBits, 4, 2, LANES_4)
#endif
}

#else /* a compiler without vector extensions: registers of one number */

#define LANES 1
#undef BYTES
#define BYTES 8

typedef double D;
typedef float F;

INLINE D all_f64(double x) { return x; }
INLINE F all_f32(float x) { return x; }
INLINE D get_f64(const double *p) { return *p; }
INLINE F get_f32(const float *p) { return *p; }
INLINE void put_f64(double *p, D x) { *p = x; }
INLINE void put_f32(float *p, F x) { *p = x; }
INLINE D widen_f32(const float *p) { return *p; }
INLINE void narrow_f32(float *p, D x) { *p = (float)x; }
INLINE D size_of_f64(D x) { return fabs(x); }
INLINE D larger_f64(D a, D b) { return a > b ? a : b; }
INLINE double lane_f64(D x, int k) { return (void)k, x; }
INLINE D multiply_add_f64(D a, D b, D c) { return a * b + c; }
#define STREAMED 16
INLINE void stream_f64(double *p, D x) { *p = x; }
INLINE void stream_f32(float *p, D x) { *p = (float)x; }
INLINE void stream_line(char *line, const char *from) { memcpy(line, from, LINE); }
INLINE void settle(void) {}

typedef uint32_t FBits;
INLINE FBits bits_of(F x) {
    FBits bits;
    memcpy(&bits, &x, sizeof(bits));
    return bits;
}
INLINE F floats_of(FBits x) {
    F value;
    memcpy(&value, &x, sizeof(value));
    return value;
}
INLINE FBits get_halves(const uint16_t *p) { return *p; }
INLINE void put_halves(uint16_t *p, FBits x) { *p = (uint16_t)x; }
INLINE int any_bit(FBits x) { return x != 0; }
INLINE float first_float(F x) { return x; }
#define WHERE(condition) (-(FBits)(condition))
INLINE void transpose_f64(D *x) { (void)x; }
INLINE void transpose_f32(F *x) { (void)x; }

#endif

/* The sum of a register's numbers, by halves: (0 + L/2), (1 + L/2 + 1), ... */
INLINE double sum_of_lanes(D x) {
    double sums[LANES];
    for (int k = 0; k < LANES; k++) sums[k] = lane_f64(x, k);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) sums[k] += sums[k + half];
    return sums[0];
}

#define FLOATS ((int)(sizeof(F) / sizeof(float)))

/* FLOATS numbers of float16, widened; exact. */
INLINE F widen_halves(const uint16_t *p) {
#if defined(SPLINCE_X86) && BYTES == 64
    return (F)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)p));
#elif defined(SPLINCE_X86) && BYTES == 32
    return (F)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)p));
#else
    FBits bits = get_halves(p), magnitude = bits & 0x7FFF;
    /* The biases of the exponents differ by 112; the product is exact, for subnormal halves too. */
    FBits wide = bits_of(floats_of(magnitude << 13) * 0x1p112f);
    wide |= WHERE(magnitude >= 0x7C00) & 0x7F800000; /* infinity and NaN */
    return floats_of(wide | (bits & 0x8000) << 16);
#endif
}

/* FLOATS numbers rounded to float16, to nearest, ties to even. */
INLINE void narrow_halves(uint16_t *p, F x) {
#if defined(SPLINCE_X86) && BYTES == 64
    _mm256_storeu_si256((__m256i *)p, _mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT));
#elif defined(SPLINCE_X86) && BYTES == 32
    _mm_storeu_si128((__m128i *)p, _mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT));
#else
    FBits bits = bits_of(x), magnitude = bits & 0x7FFFFFFF;
    /* Normal halves: rebias the exponent, add half an ulp less one and the last bit that stays. */
    FBits half = (magnitude + 0xC8000FFF + (magnitude >> 13 & 1)) >> 13;
    /* Subnormal halves: 0.5 has their ulp as its own. */
    FBits shifted = bits_of(floats_of(magnitude) + 0.5f) - 0x3F000000;
    FBits infinite = WHERE(magnitude >= 0x477FF000), nan = WHERE(magnitude > 0x7F800000);
    FBits subnormal = WHERE(magnitude < 0x38800000);
    half = (half & ~subnormal) | (shifted & subnormal);
    half = (half & ~infinite) | (0x7C00 & infinite);
    half |= nan & (0x0200 | (magnitude >> 13 & 0x03FF));
    put_halves(p, half | (bits >> 16 & 0x8000));
#endif
}

/* All bits of the numbers that are finite and round to an infinite float16: from 65520 on. */
INLINE FBits lost_in_halves(F x) {
    FBits magnitude = bits_of(x) & 0x7FFFFFFF;
    return WHERE(magnitude >= 0x477FF000) & WHERE(magnitude < 0x7F800000);
}

/* One number. */
INLINE float widen_half(uint16_t half) {
    uint16_t halves[FLOATS] = {half};
    return first_float(widen_halves(halves));
}
INLINE uint16_t narrow_half(float x) {
    uint16_t halves[FLOATS];
    narrow_halves(halves, all_f32(x));
    return halves[0];
}

/* Numbers of T in memory: a full register of T, or one; halves where T is float and `halves`. */
INLINE F read_f32(const char *p, int halves) {
    return halves ? widen_halves((const uint16_t *)p) : get_f32((const float *)p);
}
INLINE void write_f32(char *p, F x, int halves) {
    if (halves)
        narrow_halves((uint16_t *)p, x);
    else
        put_f32((float *)p, x);
}
INLINE float read_one_f32(const char *p, int halves) {
    return halves ? widen_half(*(const uint16_t *)p) : *(const float *)p;
}
INLINE void write_one_f32(char *p, float x, int halves) {
    if (halves)
        *(uint16_t *)p = narrow_half(x);
    else
        *(float *)p = x;
}
INLINE D read_f64(const char *p, int halves) { return (void)halves, get_f64((const double *)p); }
INLINE void write_f64(char *p, D x, int halves) { (void)halves, put_f64((double *)p, x); }
INLINE double read_one_f64(const char *p, int halves) { return (void)halves, *(const double *)p; }
INLINE void write_one_f64(char *p, double x, int halves) { (void)halves, *(double *)p = x; }
