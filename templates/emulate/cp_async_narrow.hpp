// Asynchronous copies of a word, in the groups of those of cp_async.hpp.

// 4 bytes. Without `valid`, 4 zero bytes are written and src is not read.
static inline void cp_async_4(u32 dst, const void* src, bool valid, int line = __builtin_LINE()) {
    emu::issue_copy(*emu::current, dst, src, 4, valid, line);
}
