// Kernels over pieces: one launch goes over the elements of many tensors, such as the gradients of
// all units of a model.
//
// A piece is a stretch of elements that several tensors have in common: a parameter, its gradient
// and its state. Each block has one chunk of one piece.
//
// Launch: blocks of 256 threads, as many as the pieces have chunks together.
#pragma once
#include "common.cuh"

// The qualifiers of a large argument, which a thread reads where it is, and does not copy.
#if defined(__CUDACC__) && \
    (__CUDACC_VER_MAJOR__ > 11 || (__CUDACC_VER_MAJOR__ == 11 && __CUDACC_VER_MINOR__ >= 7))
#define IN_PLACE const __grid_constant__
#else
#define IN_PLACE const
#endif

constexpr int MAX_PIECES = 64;
constexpr int MAX_TENSORS = 5;

struct Pieces {
    /// The address of each tensor's first element in each piece; null for a tensor that is left
    /// out.
    void* tensors[MAX_TENSORS][MAX_PIECES];
    /// The number of elements of each piece.
    int64_t counts[MAX_PIECES];
    /// The first block that has a chunk of each piece.
    int first_blocks[MAX_PIECES];
    /// The number of elements of a chunk: a multiple of every pack.
    int64_t chunk;
    int pieces;

    template <class T> DEVICE_MEMBER T* tensor(int which, int piece) const {
        return static_cast<T*>(tensors[which][piece]);
    }

#ifndef __CUDACC__
    /// Replaces addresses of the device by those of the host.
    void translate(cpu::Translate translate) {
        for (auto& addresses : tensors)
            for (int piece = 0; piece < pieces; ++piece)
                if (addresses[piece])
                    addresses[piece] = translate(reinterpret_cast<uint64_t>(addresses[piece]));
    }
#endif
};

/// What is done with all gradients of a step.
struct Clipping {
    /// Their norm before it is clipped.
    double norm;
    /// What they are multiplied by.
    float factor;
    /// Not 0 if some of them are not finite, so that the step changes nothing.
    uint32_t skip;
};

/// The elements of a piece that a block has.
struct Chunk {
    int piece;
    int64_t start, end;
};

/// Returns the chunk of this block.
DEVICE Chunk chunk_of_block(const Pieces& pieces) {
    int block = blockIdx.x, low = 0, high = pieces.pieces;
    // The last piece that begins at this block or before it.
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (pieces.first_blocks[middle] <= block)
            low = middle;
        else
            high = middle;
    }
    int64_t start = (block - pieces.first_blocks[low]) * pieces.chunk;
    return {low, start, min(start + pieces.chunk, pieces.counts[low])};
}

/// Calls `f(start, Count<M>())` for all elements of a chunk, N at a time where packs fit. With
/// UNROLL, a loop that only reads has several reads in flight.
template <int N, int UNROLL = 1, class F>
DEVICE void for_chunk(const Chunk& chunk, bool packs_fit, F f) {
    int64_t packs_end =
        packs_fit ? chunk.start + (chunk.end - chunk.start) / N * N : chunk.start;
#pragma unroll UNROLL
    for (int64_t at = chunk.start + int64_t(threadIdx.x) * N; at < packs_end;
         at += int64_t(blockDim.x) * N)
        f(at, Count<N>());
    for (int64_t at = packs_end + threadIdx.x; at < chunk.end; at += blockDim.x)
        f(at, Count<1>());
}
