//! The parts of a training around its steps: gradient clipping and scaling, the end of a step,
//! schedules of learning rates, averages of weights, and the samples of each rank.

mod averaged;
mod clip;
mod finish;
pub mod sampler;
mod scaler;
pub mod schedule;

pub use averaged::AveragedModel;
pub use clip::{ClipOptions, GradNorm, OnNonFinite};
pub use finish::{FinishOptions, FinishedStep};
pub use scaler::{GradScaler, GradScalerOptions};
