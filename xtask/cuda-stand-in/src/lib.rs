//! A stand-in for NVIDIA's libraries, with which the code for GPUs runs on a machine without one.
//!
//! The library exports the functions that this project's programs call: of CUDA's driver, cuBLAS,
//! cuRAND and NCCL. `cargo xtask gpu --stand-in` builds it, gives it the names of those libraries,
//! and runs the tests for GPUs with it.
//!
//! It is stricter than a GPU where that finds mistakes:
//!
//! - An address in GPU memory is no address of the host, so host code that follows one is ended by
//!   the system.
//! - Memory is filled with ones before it is used and when it is freed: as floating-point numbers
//!   these are not numbers.
//! - Every access is checked against the allocation that it belongs to.
//! - Every stream has a thread, so work that does not wait for other work overtakes it.
//! - A kernel of candle's runs only if candle has one of that name.
//!
//! The kernels of `fsdp-ops` run from their own sources, which the stand-in for CUDA's compiler has
//! compiled for the host.
//!
//! It counts what programs ask of it: see `CUDA_STAND_IN_COUNTS`, `cudaStandInAllCounts`, and
//! `ncclStandInOrigins`. `cudaStandInIsPinned` tells whether memory is pinned, and
//! `cudaStandInFailCopies` lets copies fail.
//!
//! It says nothing of a GPU's speed, of how its kernels round, or of its limits. Its settings are
//! environment variables:
//!
//! | variable | meaning |
//! |---|---|
//! | `CUDA_STAND_IN_DEVICES` | The number of GPUs; 1 if it is not set |
//! | `CUDA_STAND_IN_CAPABILITY` | The compute capability of each GPU, such as 75; 90 if it is not set |
//! | `CUDA_STAND_IN_MEMORY` | The bytes of each GPU's memory; 1 GiB if it is not set |
//! | `CUDA_STAND_IN_DELAY_US` | The microseconds that a stream waits before each kernel, memset, copy, and call of NCCL's; 0 if it is not set |
//! | `CUDA_STAND_IN_COMPUTES` | If it is 0, kernels and products are counted, but not carried out, and memory is not filled when it is allocated and freed; for counts of models that would take too long |
//! | `CUDA_STAND_IN_LINK_US` | The microseconds that a call of NCCL's takes; 0 if it is not set |
//! | `CUDA_STAND_IN_LINK_BYTES_PER_SECOND` | How fast calls of NCCL's move bytes between ranks; as fast as they can if it is not set |
//! | `CUDA_STAND_IN_COUNTS` | The file to which each process adds a line with its counts when it ends |
//! | `CUDA_STAND_IN_DIRECTORY` | The directory through which ranks exchange messages of NCCL; else the system's for temporary files |

mod blas;
mod counts;
mod driver;
mod handles;
mod kernels;
mod libraries;
mod machine;
mod memory;
mod modules;
mod nccl;
mod queue;
mod random;
