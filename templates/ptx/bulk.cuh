// Bulk copies of consecutive bytes by the copy engine. Addresses and numbers of bytes are multiples of 16.

// Starts the copy to `dst`; its bytes count on `barrier`.
__device__ __forceinline__ void bulk_load(u32 dst, const void* src, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(dst),
                 "l"(src), "r"(bytes), "r"(barrier)
                 : "memory");
}

// Starts the addition of float32 numbers at `src` to those at `dst`, which is part of the thread's next bulk group.
// Atomic a word, in no order.
__device__ __forceinline__ void bulk_add_f32(float* dst, u32 src, u32 bytes) {
    asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(dst), "r"(src),
                 "r"(bytes)
                 : "memory");
}
