// Boxes of tensor copies, as they lie in shared memory: one loaded, and one stored.

struct Params {
    TensorMap from;
    TensorMap to;
    u32* loaded;        // (words): the box of `from` at c0 to c3
    const u32* stored;  // (words): goes to the box of `to` at c0 to c3
    int c0, c1, c2, c3;
    int words;  // of a box
};

extern "C" __global__ void __launch_bounds__(128, 1) boxes(const __grid_constant__ Params params) {
    const u32 barrier = shared_base(), box = shared_base() + 1024;
    const int c0 = params.c0, c1 = params.c1, c2 = params.c2, c3 = params.c3;
    if (threadIdx.x == 0) {
        mbarrier_init(barrier, 1);
        mbarrier_init_fence();
        mbarrier_arrive_expect_tx(barrier, params.words * 4);
        tma_load_4d(box, params.from, c0, c1, c2, c3, barrier);
    }
    __syncthreads();
    mbarrier_wait(barrier, 0);
    for (int i = threadIdx.x * 4; i < params.words; i += 512) {
        u32 v[4];
        ld_shared_b128(v, box + i * 4);
        st_global_b128(params.loaded + i, v);
    }
    __syncthreads();  // all have read the box
    for (int i = threadIdx.x * 4; i < params.words; i += 512) {
        u32 v[4];
        ld_global_b128(v, params.stored + i);
        st_shared_b128(box + i * 4, v);
    }
    fence_proxy_async();
    __syncthreads();  // all have written it
    if (threadIdx.x == 0) {
        tma_store_4d(params.to, c0, c1, c2, c3, box);
        tma_store_commit();
        tma_store_wait_read<0>();
    }
}
