/* Registers of BYTES bytes, and all vector extensions and intrinsics of the templates.
   `level.inc.c` includes this file once per instruction set, after the pragma that selects it. D
   has LANES numbers of float64, F has FLOATS numbers of float32, a full register. `level.inc.c`
   defines for each dtype T: V (a full register of T), WIDTH (numbers in V), LOAD and STORE (LANES
   numbers of T in memory, converted to and from a D), GET and PUT (a V in memory), and BROADCAST
   (one number in every lane of a V). */

#ifdef SPLINCE_VECTORS

#define LANES (BYTES / 8)
#define VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef double D VECTOR(BYTES);
typedef float F VECTOR(BYTES);
typedef float HalfF VECTOR(BYTES / 2);
typedef int64_t Bits VECTOR(BYTES);
typedef uint32_t FBits VECTOR(BYTES);
typedef uint16_t Halves VECTOR(BYTES / 2);
/* The same types for addresses that are aligned only to one number. */
typedef D UnalignedD __attribute__((aligned(8), may_alias));
typedef F UnalignedF __attribute__((aligned(4), may_alias));
typedef HalfF UnalignedHalfF __attribute__((aligned(4), may_alias));
typedef Halves UnalignedHalves __attribute__((aligned(2), may_alias));
#define CONVERT(x, V) __builtin_convertvector(x, V)
#define WHERE(condition, Mask) ((Mask)(condition))

#else /* without vector extensions, a register is one number */

#undef BYTES
#define BYTES 8
#define LANES 1
typedef double D, UnalignedD;
typedef float F, HalfF, UnalignedF, UnalignedHalfF;
typedef int64_t Bits;
typedef uint32_t FBits;
typedef uint16_t Halves, UnalignedHalves;
#define CONVERT(x, V) ((V)(x))
#define WHERE(condition, Mask) (-(Mask)(condition))

#endif

#define FLOATS ((int)(sizeof(F) / sizeof(float)))
#if WIDE /* MM(name) is the intrinsic of AVX2 or AVX-512 */
typedef long long HalfRegister VECTOR(BYTES / 2);
#if BYTES == 64
#define MM(name) _mm512_##name
#else
#define MM(name) _mm256_##name
#endif
#endif

INLINE D broadcast_f64(double x) { return x - (D){0}; }
INLINE F broadcast_f32(float x) { return x - (F){0}; }
INLINE D get_f64(const double *p) { return *(const UnalignedD *)p; }
INLINE F get_f32(const float *p) { return *(const UnalignedF *)p; }
INLINE void put_f64(double *p, D x) { *(UnalignedD *)p = x; }
INLINE void put_f32(float *p, F x) { *(UnalignedF *)p = x; }
INLINE D widen_f64(const double *p) { return get_f64(p); }
INLINE D widen_f32(const float *p) {
#if WIDE
    return MM(cvtps_pd)(*(const UnalignedHalfF *)p);
#else
    return CONVERT(*(const UnalignedHalfF *)p, D);
#endif
}
INLINE void narrow_f64(double *p, D x) { put_f64(p, x); }
INLINE void narrow_f32(float *p, D x) { *(UnalignedHalfF *)p = CONVERT(x, HalfF); }

/* Conversions between a register and its bits. */
INLINE Bits bits_of_f64(D x) { return (union { D from; Bits to; }){x}.to; }
INLINE D of_bits_f64(Bits x) { return (union { Bits from; D to; }){x}.to; }
INLINE FBits bits_of_f32(F x) { return (union { F from; FBits to; }){x}.to; }
INLINE F of_bits_f32(FBits x) { return (union { FBits from; F to; }){x}.to; }

INLINE D abs_f64(D x) { return of_bits_f64(bits_of_f64(x) & INT64_MAX); }
INLINE D maximum_f64(D a, D b) {
#if WIDE
    return MM(max_pd)(a, b);
#else
    Bits first = WHERE(a > b, Bits);
    return of_bits_f64((first & bits_of_f64(a)) | (~first & bits_of_f64(b)));
#endif
}

/* Returns a b + c, with one rounding if the processor has fused multiply-add. The intrinsic fixes
   the rounding: in a b + c d, the compiler could choose which product to fuse. */
INLINE D multiply_add_f64(D a, D b, D c) {
#if WIDE
    return MM(fmadd_pd)(a, b, c);
#elif defined(SPLINCE_NEON)
    return (D)vfmaq_f64((float64x2_t)c, (float64x2_t)a, (float64x2_t)b);
#else
    return a * b + c;
#endif
}

/* Returns the sum of the lanes: lane k + LANES / 2 is added to lane k, and so on for the half. */
INLINE double sum_of_lanes(D x) {
    double sums[LANES];
    put_f64(sums, x);
    for (int half = LANES / 2; half > 0; half /= 2)
        for (int k = 0; k < half; k++) sums[k] += sums[k + half];
    return sums[0];
}

/* --- non-temporal stores --------------------------------------------------------------------- */

/* Non-temporal stores bypass the caches. Addresses must be multiples of STREAM_ALIGNMENT. Later
   ordinary stores may reach memory first, unless `store_fence` is called in between. */
#define STREAM_ALIGNMENT 16
INLINE void stream(void *to, const void *from, int bytes) {
#ifdef SPLINCE_X86
    UNROLL(4)
    for (int k = 0; k + 16 <= bytes; k += 16)
        _mm_stream_si128((__m128i *)((char *)to + k),
                         _mm_loadu_si128((const __m128i *)((const char *)from + k)));
    if (bytes % 16)
        _mm_stream_si64((long long *)((char *)to + bytes - 8),
                        *(const long long *)((const char *)from + bytes - 8));
#else
    memcpy(to, from, (size_t)bytes);
#endif
}
INLINE void stream_f64(double *p, D x) { stream(p, &x, sizeof(x)); }
INLINE void stream_f32(float *p, D x) {
    HalfF narrow = CONVERT(x, HalfF);
    stream(p, &narrow, sizeof(narrow));
}
INLINE void stream_line(char *line, const char *from) {
#if WIDE
    for (int k = 0; k < LINE; k += BYTES) {
        D numbers;
        memcpy(&numbers, from + k, BYTES);
        MM(stream_pd)((double *)(line + k), numbers);
    }
#else
    stream(line, from, LINE);
#endif
}
INLINE void store_fence(void) {
#ifdef SPLINCE_X86
    _mm_sfence();
#endif
}

/* --- transposing ----------------------------------------------------------------------------- */

/* Source of lane q when two registers a and b, of n lanes each, exchange blocks of s lanes; the
   lanes of b count from n. With o = 0 the result takes the even blocks, alternating between a and
   b; with o = s it takes the odd blocks. */
#define LANE(q, o, s, n) ((((q) & (s) ? (n) + (q) - (s) : (q)) + (o)) % (2 * (n)))
#define LANES_2(q, o, s, n) LANE(q, o, s, n), LANE((q) + 1, o, s, n)
#define LANES_4(q, o, s, n) LANES_2(q, o, s, n), LANES_2((q) + 2, o, s, n)
#define LANES_8(q, o, s, n) LANES_4(q, o, s, n), LANES_4((q) + 4, o, s, n)
#define LANES_16(q, o, s, n) LANES_8(q, o, s, n), LANES_8((q) + 8, o, s, n)
#if defined(__clang__) || __GNUC__ >= 12
#define SHUFFLE(a, b, Mask, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define SHUFFLE(a, b, Mask, ...) __builtin_shuffle(a, b, (Mask){__VA_ARGS__})
#endif
#define EXCHANGE(V, Mask, n, s, LIST) \
    UNROLL(16) \
    for (int p = 0; p < n; p++) \
        if (s < n && !(p & s)) { \
            V a = x[p], b = x[(p + s) % n]; \
            x[p] = SHUFFLE(a, b, Mask, LIST(0, 0, s, n)); \
            x[(p + s) % n] = SHUFFLE(a, b, Mask, LIST(0, s, s, n)); \
        }
#define TRANSPOSE(name, V, Mask, n, LIST) \
    INLINE void name(V *x) { \
        EXCHANGE(V, Mask, n, 1, LIST) \
        EXCHANGE(V, Mask, n, 2, LIST) \
        EXCHANGE(V, Mask, n, 4, LIST) \
        EXCHANGE(V, Mask, n, 8, LIST) \
    }
#if BYTES == 64
TRANSPOSE(transpose_f64, D, Bits, 8, LANES_8)
TRANSPOSE(transpose_f32, F, FBits, 16, LANES_16)
#elif BYTES == 32
TRANSPOSE(transpose_f64, D, Bits, 4, LANES_4)
TRANSPOSE(transpose_f32, F, FBits, 8, LANES_8)
#elif BYTES == 16
TRANSPOSE(transpose_f64, D, Bits, 2, LANES_2)
TRANSPOSE(transpose_f32, F, FBits, 4, LANES_4)
#else
INLINE void transpose_f64(D *x) { (void)x; }
INLINE void transpose_f32(F *x) { (void)x; }
#endif

/* --- float16 as bits ------------------------------------------------------------------------- */

/* Returns FLOATS numbers of float16, converted exactly to float32. */
INLINE F widen_halves(const uint16_t *p) {
#if WIDE
    return MM(cvtph_ps)((HalfRegister) * (const UnalignedHalves *)p);
#else
    FBits bits = CONVERT(*(const UnalignedHalves *)p, FBits), magnitude = bits & 0x7FFF;
    /* The exponent biases of float16 and float32 differ by 112. The product is exact, also for
       subnormal numbers. */
    FBits wide = bits_of_f32(of_bits_f32(magnitude << 13) * 0x1p112f);
    wide |= WHERE(magnitude >= 0x7C00, FBits) & 0x7F800000; /* infinity and NaN */
    return of_bits_f32(wide | (bits & 0x8000) << 16);
#endif
}

/* Rounds FLOATS numbers to float16, to nearest, ties to even. */
INLINE void narrow_halves(uint16_t *p, F x) {
#if WIDE
    *(UnalignedHalves *)p = (Halves)MM(cvtps_ph)(x, _MM_FROUND_TO_NEAREST_INT);
#else
    FBits bits = bits_of_f32(x), magnitude = bits & 0x7FFFFFFF;
    /* Normal results: rebias the exponent. Adding half an ulp minus one, plus the last kept bit,
       rounds to nearest, ties to even. */
    FBits half = (magnitude + 0xC8000FFF + (magnitude >> 13 & 1)) >> 13;
    /* Subnormal results: adding 0.5 rounds, because the ulp of 0.5 in float32 equals the ulp of
       subnormal float16 numbers. */
    FBits shifted = bits_of_f32(of_bits_f32(magnitude) + 0.5f) - 0x3F000000;
    FBits infinite = WHERE(magnitude >= 0x477FF000, FBits);
    FBits subnormal = WHERE(magnitude < 0x38800000, FBits);
    half = (half & ~subnormal) | (shifted & subnormal);
    half = (half & ~infinite) | (0x7C00 & infinite);
    half |= WHERE(magnitude > 0x7F800000, FBits) & (0x0200 | (magnitude >> 13 & 0x03FF));
    *(UnalignedHalves *)p = CONVERT(half | (bits >> 16 & 0x8000), Halves);
#endif
}

/* Returns a mask with all bits set in the lanes whose number is finite and overflows float16: its
   magnitude is at least 65520. */
INLINE FBits overflows_float16(F x) {
    FBits magnitude = bits_of_f32(x) & 0x7FFFFFFF;
    return WHERE(magnitude >= 0x477FF000, FBits) & WHERE(magnitude < 0x7F800000, FBits);
}

/* Read or write a full register of T in memory; if T is float and `halves`, memory has float16. */
INLINE F read_f32(const char *p, int halves) {
    return halves ? widen_halves((const uint16_t *)p) : get_f32((const float *)p);
}
INLINE void write_f32(char *p, F x, int halves) {
    if (halves)
        narrow_halves((uint16_t *)p, x);
    else
        put_f32((float *)p, x);
}
INLINE D read_f64(const char *p, int halves) { return (void)halves, get_f64((const double *)p); }
INLINE void write_f64(char *p, D x, int halves) { (void)halves, put_f64((double *)p, x); }
