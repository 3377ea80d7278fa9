// One deliberate error for each number of `fault`, in block 1 alone, on the line that its name marks; 0 is none.

struct Params {
    const float* input;  // 64 floats
    float* output;       // 64 floats
    float* read_only;    // 64 floats, passed as not writable
    int fault;
};

constexpr int SHARED_BYTES = 1024;

extern "C" __global__ void __launch_bounds__(64, 1) faults(const __grid_constant__ Params params) {
    const int thread = threadIdx.x;
    const u32 smem = shared_base();
    const u32 mine = smem + thread * 16;
    const int fault = blockIdx.x == 1 ? params.fault : 0;
    const u32 zeros[4] = {0, 0, 0, 0};
    u32 v[4];

    // All but the last 16 bytes are written.
    if (thread != 63) st_shared_b128(mine, zeros);
    __syncthreads();

    if (fault == 1) {
        if (thread == 3) st_shared_b32(smem + 128, 1);
        if (thread == 37) ld_shared_b32(smem + 128);  // FAULT missing_syncthreads_raw
    }
    if (fault == 2) {
        if (thread == 3) ld_shared_b32(smem + 128);
        if (thread == 37) st_shared_b32(smem + 128, 1);  // FAULT missing_syncthreads_war
    }
    if (fault == 3) {
        if (thread == 3) st_shared_b32(smem + 128, 1);
        if (thread == 37) st_shared_b128(smem + 128, zeros);  // FAULT missing_syncthreads_waw
    }
    if (fault == 4) {
        st_shared_b32(mine, 1);
        v[0] = __shfl_xor_sync(0xffffffffu, thread, 1);  // orders no memory
        if (thread == 37) ld_shared_b32(mine - 16);      // FAULT missing_syncwarp
    }
    if (fault == 5) {
        ldmatrix_x4(v, smem + thread % 32 * 16);
        if (thread == 37) st_shared_b32(smem + 6 * 16, 1);  // FAULT ldmatrix_war
    }
    if (fault == 6) {
        if (thread == 40) cp_async_16(smem, params.input, true);
        cp_async_commit();
        __syncthreads();
        if (thread == 41) ld_shared_b32(smem + 8);  // FAULT missing_wait
    }
    if (fault == 7) {
        cp_async_16(mine, params.input, true);
        cp_async_commit();
        cp_async_wait<1>();
        __syncthreads();
        if (thread < 32) ldmatrix_x4(v, mine);  // FAULT wait_for_too_few
    }
    if (fault == 8) {
        if (thread == 40) cp_async_16(smem, params.input, true);
        cp_async_commit();
        cp_async_wait<0>();
        if (thread == 41) ld_shared_b32(smem + 8);  // FAULT wait_without_barrier
    }
    if (fault == 9) {
        if (thread < 32) ldmatrix_x4(v, smem + thread * 16);
        if (thread == 63) cp_async_16(smem + 7 * 16, params.input, true);  // FAULT copy_over_read
    }
    if (fault == 10) {
        if (thread == 2) cp_async_16(smem, params.input, true);
        __syncthreads();
        if (thread == 33) st_shared_b32(smem, 1);  // FAULT store_over_copy
    }
    if (fault == 11) {
        if (thread == 35) ld_shared_b128(v, smem + SHARED_BYTES);  // FAULT shared_read_past_end
    }
    if (fault == 12) {
        if (thread == 35) st_shared_b32(smem - 4, 0);  // FAULT shared_write_before_start
    }
    if (fault == 13) {
        if (thread < 32)
            ldmatrix_x4(v, smem + thread * 16 + (thread == 9 ? SHARED_BYTES : 0));  // FAULT ldmatrix_row_past_end
    }
    if (fault == 14) {
        if (thread == 35) cp_async_16(smem + SHARED_BYTES, params.input, false);  // FAULT copy_to_past_end
    }
    if (fault == 15) {
        if (thread == 35) v[0] = ld_global_f32(params.input + 64) > 0.0f;  // FAULT global_read_past_end
    }
    if (fault == 16) {
        if (thread == 35) st_global_f32(params.output - 1, 0.0f);  // FAULT global_write_before_start
    }
    if (fault == 17) {
        if (thread == 35) st_global_f32(params.read_only + 7, 0.0f);  // FAULT global_write_to_read_only
    }
    if (fault == 18) {
        if (thread == 35) cp_async_16(smem, params.input + 64, true);  // FAULT copy_from_past_end
    }
    if (fault == 19) {
        if (thread == 35) st_global_b128(params.output + 62, zeros);  // FAULT global_write_misaligned
    }
    if (fault == 20) {
        if (thread == 35) v[0] = static_cast<u32>(ld_global_b64(params.input + 3));  // FAULT global_read_misaligned
    }
    if (fault == 21) {
        if (thread == 35) ld_shared_b128(v, smem + 8);  // FAULT shared_misaligned
    }
    if (fault == 22) {
        if (thread < 32) ldmatrix_x4(v, smem + thread * 16 + (thread == 9 ? 8 : 0));  // FAULT ldmatrix_misaligned
    }
    if (fault == 23) {
        if (thread == 35) cp_async_16(smem, params.input + 2, true);  // FAULT copy_misaligned
    }
    if (fault == 24) {
        if (thread == 37) return;
        __syncthreads();  // FAULT barrier_after_exit
    }
    if (fault == 25) {
        if (thread == 10) __syncwarp();
        __syncthreads();  // FAULT barrier_against_syncwarp
    }
    if (fault == 26) {
        if (thread < 48) {
            __syncthreads();
        } else {
            __syncthreads();  // FAULT two_barriers
        }
    }
    if (fault == 27) {
        if (thread % 32 < 20)
            v[0] = __shfl_xor_sync(0xffffffffu, thread, 1);
        else
            v[0] = __shfl_xor_sync(0xffffffffu, thread, 1);  // FAULT divergent_shuffle
    }
    if (fault == 28) {
        if (thread == 44) return;
        if (thread >= 32) ldmatrix_x4(v, smem);  // FAULT collective_after_exit
    }
    if (fault == 29) {
        if (thread == 35) __syncwarp(0xfffffff7u);  // FAULT mask_without_caller
    }
    if (fault == 30) {
        if (thread < 8) v[0] = __shfl_xor_sync(0x000000ffu, thread, 8);  // FAULT shuffle_from_outside
    }
    if (fault == 31) {
        if (thread == 62) ld_shared_b128(v, smem + 63 * 16);  // FAULT unwritten
    }
    if (fault == 32) {
        if (thread >= 32) ldmatrix_x4(v, mine);  // FAULT ldmatrix_unwritten
    }
    if (fault == 33) {
        if (thread == 40 || thread == 41) st_shared_b32(smem + 512, 1);  // FAULT warp_writes_one_word
    }
    if (fault == 34) {
        if (thread == 35) cp_async_16(smem, nullptr, true);  // FAULT copy_from_null
    }
    if (fault == 35) {
        if (thread == 40) cp_async_4(smem + 8, params.input, true);
        cp_async_commit();
        __syncthreads();
        if (thread == 41) ld_shared_b32(smem + 12);
        if (thread == 42) ld_shared_b32(smem + 8);  // FAULT word_missing_wait
    }
    if (fault == 36) {
        if (thread == 40) cp_async_4(smem + 8, params.input, true);
        cp_async_commit();
        cp_async_wait<0>();
        if (thread == 41) ld_shared_b32(smem + 8);  // FAULT word_wait_without_barrier
    }
    if (fault == 37) {
        if (thread < 32) ld_shared_b32(smem + thread * 4);
        if (thread == 63) cp_async_4(smem + 32 * 4, params.input, true);
        if (thread == 63) cp_async_4(smem + 7 * 4, params.input, true);  // FAULT word_copy_over_read
    }
    if (fault == 38) {
        if (thread == 2) cp_async_4(smem + 4, params.input, true);
        __syncthreads();
        if (thread == 33) cp_async_16(smem, params.input, true);  // FAULT copy_over_word_copy
    }
    if (fault == 39) {
        if (thread == 35) cp_async_4(smem + SHARED_BYTES, params.input, false);  // FAULT word_copy_to_past_end
    }
    if (fault == 40) {
        if (thread == 35) cp_async_4(smem, params.input + 64, true);  // FAULT word_copy_from_past_end
    }
    if (fault == 41) {
        if (thread == 35) cp_async_4(smem + 2, params.input, true);  // FAULT word_copy_to_misaligned
    }
    if (fault == 42) {
        const void* const unaligned = reinterpret_cast<const unsigned char*>(params.input) + 2;
        if (thread == 35) cp_async_4(smem, unaligned, true);  // FAULT word_copy_misaligned
    }
    st_global_f32(params.output + thread, static_cast<float>(fault));
}
