// Kernels of one stream that overlap (programmatic dependent launch): the launch of one may allow it to start once all
// blocks of the kernel before it have ended or allowed it. Where cards cannot, these do nothing, nor do such launches.

// What the kernel before this one wrote is there. Does not return before that kernel has ended.
__device__ __forceinline__ void grid_wait_for_previous() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// The kernel after this one may start, as far as this block is concerned.
__device__ __forceinline__ void grid_allow_next() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}
