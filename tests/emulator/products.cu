// One product of a warpgroup: d = a b, with shared memory as it is given, by descriptors.

struct Params {
    const u32* shared;       // (shared_words): what lies in shared memory
    const u32* a_registers;  // (128, 4): a, as each thread holds it
    const u64* descriptors;  // a, b; their start addresses count from the start of shared memory
    float* d;                // (128, columns / 2): in and out, as each thread holds it
    int shared_words, columns;
    int trans_a, trans_b;  // MN-major
    int from_registers;    // a
    int accumulate;
    int repeats;
    int early;  // what d holds before the wait comes back
    int fresh;  // ss_new, of 64 columns, both operands MN-major or none
};

template <int N, class Product>
__device__ __forceinline__ void run(const Params& params, Product product) {
    float D_rmem[N / 8][4];
    float* d = params.d + threadIdx.x * (N / 2);
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) D_rmem[j][i] = ld_global_f32(d + 4 * j + i);
    }
    wgmma_hold(D_rmem);
    wgmma_fence();
    product(D_rmem, params.accumulate != 0);
    for (int i = 1; i < params.repeats; ++i) product(D_rmem, true);
    wgmma_commit();
    if (params.early) {
        wgmma_hold(D_rmem);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 4; ++i) st_global_f32(d + 4 * j + i, D_rmem[j][i]);
        }
    }
    wgmma_wait<0>();
    wgmma_hold(D_rmem);
    if (params.early) return;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 4; ++i) st_global_f32(d + 4 * j + i, D_rmem[j][i]);
    }
}

template <int TRANS>
__device__ __forceinline__ auto new_product(u64 a, u64 b) {
    return [=](float (&d)[8][4], bool accumulate) {
        if (accumulate)
            wgmma_m64n64k16_bf16_ss<TRANS, TRANS>(d, a, b, true);
        else
            wgmma_m64n64k16_bf16_ss_new<TRANS, TRANS>(d, a, b);
    };
}

// Every form and layout of one number of columns.
#define PRODUCTS(N)                                                           \
    if (params.columns == N) {                                                \
        if (params.from_registers && params.trans_b)                          \
            run<N>(params, [&](float (&d)[N / 8][4], bool accumulate) {       \
                wgmma_m64n##N##k16_bf16_rs<1>(d, a_registers, b, accumulate); \
            });                                                               \
        else if (params.from_registers)                                       \
            run<N>(params, [&](float (&d)[N / 8][4], bool accumulate) {       \
                wgmma_m64n##N##k16_bf16_rs<0>(d, a_registers, b, accumulate); \
            });                                                               \
        else if (params.trans_a && params.trans_b)                            \
            run<N>(params, [&](float (&d)[N / 8][4], bool accumulate) {       \
                wgmma_m64n##N##k16_bf16_ss<1, 1>(d, a, b, accumulate);        \
            });                                                               \
        else if (params.trans_a)                                              \
            run<N>(params, [&](float (&d)[N / 8][4], bool accumulate) {       \
                wgmma_m64n##N##k16_bf16_ss<1, 0>(d, a, b, accumulate);        \
            });                                                               \
        else if (params.trans_b)                                              \
            run<N>(params, [&](float (&d)[N / 8][4], bool accumulate) {       \
                wgmma_m64n##N##k16_bf16_ss<0, 1>(d, a, b, accumulate);        \
            });                                                               \
        else                                                                  \
            run<N>(params, [&](float (&d)[N / 8][4], bool accumulate) {       \
                wgmma_m64n##N##k16_bf16_ss<0, 0>(d, a, b, accumulate);        \
            });                                                               \
    }

extern "C" __global__ void __launch_bounds__(128, 1) products(const __grid_constant__ Params params) {
    for (int i = threadIdx.x * 4; i < params.shared_words; i += 512) {
        u32 v[4];
        ld_global_b128(v, params.shared + i);
        st_shared_b128(shared_base() + i * 4, v);
    }
    fence_proxy_async();
    __syncthreads();
    u32 a_registers[4];
    ld_global_b128(a_registers, params.a_registers + threadIdx.x * 4);
    const u64 base = shared_base() >> 4;
    const u64 a = ld_global_b64(params.descriptors) + base, b = ld_global_b64(params.descriptors + 1) + base;
    if (params.fresh && params.trans_a) return run<64>(params, new_product<1>(a, b));
    if (params.fresh) return run<64>(params, new_product<0>(a, b));
    PRODUCTS(16)
    PRODUCTS(64)
    PRODUCTS(80)
    PRODUCTS(96)
    PRODUCTS(128)
    PRODUCTS(176)
    PRODUCTS(256)
}
