// Blocks that add to two sums one after the other: one by the copy engine, one by the threads of a warp.

struct Params {
    const float* terms;  // (blocks, 128)
    float* by_engine;    // (128)
    float* by_threads;   // (128)
    u32* turns;          // (2), zeros: the blocks that have added theirs
    const u32* order;    // (blocks): the turn of each
    int mute;            // the block that does not pass its turns on; none: -1
    int faulty;          // the block that instead writes past the end of the turns; none: -1
};

extern "C" __global__ void __launch_bounds__(64, 1) turns(const __grid_constant__ Params params) {
    const u32 row = shared_base();
    const int block = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const float* terms = params.terms + block * 128 + lane * 4;
    const u32 turn = ld_global_b32(params.order + block);
    if (warp == 0) {
        u32 v[4];
        ld_global_b128(v, terms);
        st_shared_b128(row + lane * 16, v);
        fence_proxy_async();
        __syncwarp();
        if (lane == 0) {
            turn_await(params.turns, turn);  // WAITS
            bulk_add_f32(params.by_engine, row, 512);
            tma_store_commit();
            tma_store_wait<0>();                                      // the sum has it
            if (block == params.faulty) turn_pass(params.turns + 2);  // FAULTY
            if (block != params.mute) turn_pass(params.turns);
        }
    } else {
        float v[4];
        ld_global_f32x4(v, terms);
        if (lane == 0) turn_await(params.turns + 1, turn);
        __syncwarp();
        red_global_add_f32x4(params.by_threads + lane * 4, v);
        __syncwarp();  // what passes the turn on releases the other lanes' additions too
        if (lane == 0 && block != params.mute) turn_pass(params.turns + 1);
    }
}
