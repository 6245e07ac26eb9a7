//! The arithmetic of `torch.optim`'s SGD, Adam, AdamW, Adagrad, Adafactor and Muon, and of
//! schedule-free AdamW: options, param-group keys, state schema, and the update itself.
//!
//! Nothing here depends on tensors or ranks. [`Algorithm::update`] goes once over the slices of one
//! parameter, its gradient and its state, in place and without allocating. All update rules except
//! Adafactor's and Muon's are element-wise. So a rank can run them on the pieces of a parameter
//! that it holds, and gets the same bits as for the whole parameter.
//!
//! # Arithmetic
//! Results follow torch's single-tensor CPU path (`foreach=False`) on a CPU with fused
//! multiply-add, operation by operation: scalars such as bias corrections are computed in `f64` as
//! Python does, then rounded to the type that elements compute in. `f32` and `f64` compute in
//! themselves; `bf16` and `f16` compute in `f32`, and each of torch's tensor operations rounds to
//! the half type. In tests against torch 2.15 all four agree bit for bit, with two exceptions:
//!
//! - Square roots are correctly rounded here. torch built with MKL takes those of `f32` and `f64`
//!   from MKL, where a fifth of the `f32` results are off by one unit in the last place. Parameters
//!   under Adam, AdamW and Adagrad then differ by roundings.
//! - Where a tensor's elements do not fill torch's last vector, its `add(alpha=…)` rounds half
//!   types once more for those. Here all elements are treated alike, so that a result does not
//!   depend on how a parameter was cut.
//!
//! With `f16` an `eps` of 1e-8 rounds to zero. A zero gradient is then divided by zero, which torch
//! does not check. An optimizer here refuses it.
//!
//! # Speed
//! The loops are vectorised, also for the x86-64 baseline. `f32` comes near the memory's speed.
//! `f64` calls the C library's `fma` unless the build may use the instruction (`-C
//! target-cpu=x86-64-v3`), which also doubles the speed of the half types. The example
//! `algorithm_bandwidth` measures.

mod adafactor;
mod adagrad;
mod adam;
mod error;
mod float;
mod group;
mod half_bits;
mod muon;
mod schedule_free;
mod sgd;
mod state;
#[cfg(test)]
mod tests;

use error::check_at_least_zero;
use fsdp_layout::{DType, PlainValue};

pub use adafactor::AdafactorOptions;
pub(crate) use adafactor::{WholeUpdate, average_shapes};
pub use adagrad::AdagradOptions;
pub use adam::AdamOptions;
pub(crate) use adam::bias_correction;
pub use error::AlgorithmError;

pub use float::Float;
pub(crate) use float::{lerp, multiply};
pub use group::Switches;
pub use muon::{MuonAdjust, MuonOptions};
pub use schedule_free::ScheduleFreeOptions;
pub use sgd::SgdOptions;
pub use state::{Initial, StateEntry, StateKind};

/// The findings of [`Algorithm::with_group`] in a param group.
#[derive(Debug, Clone, PartialEq)]
pub struct ReadGroup {
    /// The algorithm with the group's hyperparameters.
    pub algorithm: Algorithm,
    /// Keys that the algorithm does not know, in the group's order, as they were.
    pub unknown: Vec<(String, PlainValue)>,
    /// Keys that the group lacks. Their hyperparameters kept the values that they had.
    pub missing: Vec<&'static str>,
}

/// An optimizer's update rule with its hyperparameters: those of one param group.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub enum Algorithm {
    /// `torch.optim.SGD`
    Sgd(SgdOptions),
    /// `torch.optim.Adam`: weight decay is added to the gradient.
    Adam(AdamOptions),
    /// `torch.optim.AdamW`: weight decay shrinks the parameter. Start from [`AdamOptions::adamw`]
    /// for its defaults.
    AdamW(AdamOptions),
    /// `torch.optim.Adagrad`
    Adagrad(AdagradOptions),
    /// `torch.optim.Adafactor`. Its steps communicate: see
    /// [`Optimizer::step`](crate::Optimizer::step).
    Adafactor(AdafactorOptions),
    /// `torch.optim.Muon`, for parameters that are matrices. Its steps communicate: see
    /// [`Optimizer::step`](crate::Optimizer::step).
    Muon(MuonOptions),
    /// `schedulefree.AdamWScheduleFree`: see [`ScheduleFreeOptions`].
    ScheduleFreeAdamW(ScheduleFreeOptions),
}

/// Evaluates an expression for the options of an algorithm, whichever it is.
macro_rules! with_options {
    ($algorithm:expr, $options:ident => $value:expr) => {
        match $algorithm {
            Algorithm::Sgd($options) => $value,
            Algorithm::Adam($options) | Algorithm::AdamW($options) => $value,
            Algorithm::Adagrad($options) => $value,
            Algorithm::Adafactor($options) => $value,
            Algorithm::Muon($options) => $value,
            Algorithm::ScheduleFreeAdamW($options) => $value,
        }
    };
}

impl Algorithm {
    /// Returns torch's class name.
    #[must_use]
    pub const fn name(&self) -> &'static str {
        match self {
            Algorithm::Sgd(_) => "SGD",
            Algorithm::Adam(_) => "Adam",
            Algorithm::AdamW(_) => "AdamW",
            Algorithm::Adagrad(_) => "Adagrad",
            Algorithm::Adafactor(_) => "Adafactor",
            Algorithm::Muon(_) => "Muon",
            Algorithm::ScheduleFreeAdamW(_) => schedule_free::NAME,
        }
    }

    /// Returns the learning rate.
    #[must_use]
    pub const fn lr(&self) -> f64 {
        with_options!(self, options => options.lr)
    }

    /// Changes the learning rate, as a scheduler does.
    ///
    /// # Errors
    /// [`AlgorithmError::OutOfRange`] for a negative or non-finite rate. The old rate stays then.
    pub fn set_lr(&mut self, lr: f64) -> Result<(), AlgorithmError> {
        check_at_least_zero(self.name(), &[("lr", lr)])?;
        with_options!(self, options => options.lr = lr);
        Ok(())
    }

    /// Checks the hyperparameters, as the constructors of `torch.optim` do; here they must be
    /// finite as well.
    ///
    /// # Errors
    /// [`AlgorithmError::OutOfRange`] and [`AlgorithmError::Nesterov`].
    pub fn validate(&self) -> Result<(), AlgorithmError> {
        with_options!(self, options => options.validate(self.name()))
    }

    /// Checks that parameters of this dtype can be updated: `f32`, `f64`, `bf16` and `f16` can,
    /// the last only with an `eps` that it can hold.
    ///
    /// # Errors
    /// [`AlgorithmError::UnsupportedDType`] and [`AlgorithmError::VanishingEps`].
    pub(crate) fn check_dtype(&self, dtype: DType) -> Result<(), AlgorithmError> {
        fn vanishes<T: Float>(eps: f64) -> bool {
            float::Element::<T>::from_scalar(eps).is_zero()
        }
        // Only divisors that contain `eps` can become zero.
        let eps = match self {
            Algorithm::Sgd(_) | Algorithm::Adafactor(_) | Algorithm::Muon(_) => 0.0,
            Algorithm::Adam(options) | Algorithm::AdamW(options) => options.eps,
            Algorithm::Adagrad(options) => options.eps,
            Algorithm::ScheduleFreeAdamW(options) => options.eps,
        };
        let eps_vanishes = match dtype {
            DType::F64 => false,
            DType::F32 => vanishes::<f32>(eps),
            DType::BF16 => vanishes::<half::bf16>(eps),
            DType::F16 => vanishes::<half::f16>(eps),
            dtype => {
                return Err(AlgorithmError::UnsupportedDType {
                    algorithm: self.name(),
                    dtype,
                });
            }
        };
        if eps > 0.0 && eps_vanishes {
            return Err(AlgorithmError::VanishingEps {
                algorithm: self.name(),
                eps,
                dtype,
            });
        }
        Ok(())
    }

    /// Returns the hyperparameters as `torch.optim` keeps them in `param_groups`: the same keys, in
    /// the same order, with the same types, without `params`. Where torch's default is the integer
    /// 0, zero is written as that.
    #[must_use]
    pub fn to_group(&self) -> Vec<(String, PlainValue)> {
        match self {
            Algorithm::Sgd(options) => options.to_group(),
            Algorithm::Adam(options) => options.to_group(false),
            Algorithm::AdamW(options) => options.to_group(true),
            Algorithm::Adagrad(options) => options.to_group(),
            Algorithm::Adafactor(options) => options.to_group(),
            Algorithm::Muon(options) => options.to_group(),
            Algorithm::ScheduleFreeAdamW(options) => options.to_group(),
        }
    }

    /// Returns these hyperparameters, replaced by those that a param group holds.
    ///
    /// A key that the group lacks keeps its present value and is listed in [`ReadGroup::missing`].
    /// Switches that older versions of torch did not have (`maximize`, `fused`, …) get torch's
    /// default instead, as in torch. A key that the algorithm does not know (`initial_lr`, or those
    /// of another optimizer) goes to [`ReadGroup::unknown`] as it is. If a key occurs twice, the
    /// last one counts. As in torch, an Adam group with `decoupled_weight_decay` makes an
    /// [`Algorithm::AdamW`], and AdamW stays what it is.
    ///
    /// # Errors
    /// [`AlgorithmError::WrongType`] (integers may stand for floats, lists for tuples, nothing
    /// else), and those of [`validate`](Algorithm::validate).
    pub fn with_group(&self, group: &[(String, PlainValue)]) -> Result<ReadGroup, AlgorithmError> {
        // A saved group may say that the decay of Adam is decoupled, which makes it AdamW.
        let mut reader = group::Reader::new(self.name(), group);
        let algorithm = match self {
            Algorithm::Sgd(options) => Algorithm::Sgd(options.read(&mut reader)?),
            Algorithm::Adam(options) => match options.read(&mut reader, false)? {
                (options, true) => Algorithm::AdamW(options),
                (options, false) => Algorithm::Adam(options),
            },
            Algorithm::AdamW(options) => Algorithm::AdamW(options.read(&mut reader, true)?.0),
            Algorithm::Adagrad(options) => Algorithm::Adagrad(options.read(&mut reader)?),
            Algorithm::Adafactor(options) => Algorithm::Adafactor(options.read(&mut reader)?),
            Algorithm::Muon(options) => Algorithm::Muon(options.read(&mut reader)?),
            Algorithm::ScheduleFreeAdamW(options) => {
                Algorithm::ScheduleFreeAdamW(options.read(&mut reader)?)
            }
        };
        algorithm.validate()?;
        let (unknown, missing) = reader.finish();
        Ok(ReadGroup {
            algorithm,
            unknown,
            missing,
        })
    }

    /// Returns the state kept for each parameter, in torch's order. SGD without momentum keeps
    /// none.
    pub fn state_entries(&self) -> impl Iterator<Item = StateEntry> + use<> {
        let entries = with_options!(self, options => options.state_entries());
        entries.into_iter().flatten()
    }

    /// Returns the names and the shapes of Adafactor's averages, which a parameter of this shape
    /// has from its first step on, beside its [`state_entries`](Algorithm::state_entries).
    pub(crate) fn averages_of(&self, shape: &[usize]) -> Vec<(&'static str, Vec<usize>)> {
        if matches!(self, Algorithm::Adafactor(_)) {
            average_shapes(shape)
        } else {
            Vec::new()
        }
    }

    /// Returns `true` for a state entry that some algorithm has, but this one has not, whatever its
    /// options are.
    pub(crate) fn is_foreign_entry(&self, name: &str) -> bool {
        const MOMENTUM: &[&str] = &["momentum_buffer"];
        const ADAM: &[&str] = &["step", "exp_avg", "exp_avg_sq", "max_exp_avg_sq"];
        const ADAGRAD: &[&str] = &["step", "sum"];
        const ADAFACTOR: &[&str] = &["step", "row_var", "col_var", "variance"];
        const SCHEDULE_FREE: &[&str] = &["step", "z", "exp_avg_sq"];
        let own_names = match self {
            Algorithm::Sgd(_) | Algorithm::Muon(_) => MOMENTUM,
            Algorithm::Adam(_) | Algorithm::AdamW(_) => ADAM,
            Algorithm::Adagrad(_) => ADAGRAD,
            Algorithm::Adafactor(_) => ADAFACTOR,
            Algorithm::ScheduleFreeAdamW(_) => SCHEDULE_FREE,
        };
        let all_names = [MOMENTUM, ADAM, ADAGRAD, ADAFACTOR, SCHEDULE_FREE];
        all_names.iter().any(|names| names.contains(&name)) && !own_names.contains(&name)
    }

    /// Returns the kind of a state entry of a parameter of this shape. Returns `None` for an entry
    /// that the algorithm does not have, and for one that has a shape of its own, such as
    /// Adafactor's averages of rows.
    pub(crate) fn kind_of(&self, name: &str, shape: &[usize]) -> Option<StateKind> {
        if let Some(entry) = self.state_entries().find(|entry| entry.name == name) {
            return Some(entry.kind);
        }
        // An average of a parameter of one dimension has the parameter's shape.
        let averages = self.averages_of(shape);
        let is_like_parameter = averages
            .iter()
            .any(|(average, average_shape)| *average == name && average_shape == shape);
        is_like_parameter.then_some(StateKind::LikeParameter)
    }

    /// Returns `true` if torch makes the state when the optimizer is constructed (Adagrad), rather
    /// than at a parameter's first update.
    pub(crate) const fn state_exists_from_construction(&self) -> bool {
        matches!(self, Algorithm::Adagrad(_))
    }

    /// Returns `true` if an update needs the whole parameter, and not only a rank's part of it.
    pub(crate) const fn needs_whole_parameters(&self) -> bool {
        matches!(self, Algorithm::Adafactor(_) | Algorithm::Muon(_))
    }

    /// Updates one parameter, or a piece of it, in place: `torch.optim.Optimizer.step` for its
    /// elements.
    ///
    /// `step` is the number of this update: what the `step` entry holds once it is incremented,
    /// which is the caller's task; SGD and schedule-free AdamW, which have none, ignore it.
    ///
    /// `state` holds the entries of [`StateKind::LikeParameter`] in the order of
    /// [`state_entries`](Algorithm::state_entries). `is_first` says that entries with
    /// [`Initial::FirstGradient`] do not exist yet: what their slices hold is then overwritten
    /// unread. No collective runs, and nothing is allocated.
    ///
    /// # Errors
    /// [`AlgorithmError::Step`], [`AlgorithmError::StateCount`] and [`AlgorithmError::Length`],
    /// before anything is changed; [`AlgorithmError::NotElementwise`] for Adafactor and Muon.
    ///
    /// ```
    /// use fsdp_nn::algorithm::{Algorithm, SgdOptions};
    ///
    /// let sgd = Algorithm::Sgd(SgdOptions { lr: 0.5, momentum: 0.5, ..SgdOptions::default() });
    /// let (mut param, mut momentum) = ([1.0f32, 2.0], [0.0; 2]);
    /// sgd.update(1.0, true, &mut param, &[1.0, 0.0], &mut [&mut momentum])?;
    /// sgd.update(2.0, false, &mut param, &[1.0, 0.0], &mut [&mut momentum])?;
    /// assert_eq!((param, momentum), ([-0.25, 2.0], [1.5, 0.0]));
    /// # Ok::<(), fsdp_nn::algorithm::AlgorithmError>(())
    /// ```
    pub fn update<T: Float>(
        &self,
        step: f32,
        is_first: bool,
        param: &mut [T],
        grad: &[T],
        state: &mut [&mut [T]],
    ) -> Result<(), AlgorithmError> {
        check_length("grad", grad.len(), param.len())?;
        for (name, slice) in self.slice_names().zip(&*state) {
            check_length(name, slice.len(), param.len())?;
        }
        self.check_step(step)?;
        let found = state.len();
        let decoupled = matches!(self, Algorithm::AdamW(_));
        match (self, state) {
            (Algorithm::Sgd(options), []) if options.momentum == 0.0 => options.update(param, grad),
            (Algorithm::Sgd(options), [buffer]) if options.momentum != 0.0 => {
                options.update_with_momentum(is_first, param, grad, buffer);
            }
            (Algorithm::Adam(options) | Algorithm::AdamW(options), [exp_avg, exp_avg_sq])
                if !options.amsgrad =>
            {
                let scalars = options.scalars(decoupled, step);
                scalars.update(param, grad, [exp_avg, exp_avg_sq]);
            }
            (Algorithm::Adam(options) | Algorithm::AdamW(options), [exp_avg, exp_avg_sq, max])
                if options.amsgrad =>
            {
                let scalars = options.scalars(decoupled, step);
                scalars.update_amsgrad(param, grad, [exp_avg, exp_avg_sq, max]);
            }
            (Algorithm::Adagrad(options), [sum]) => options.update(step, param, grad, sum),
            (Algorithm::ScheduleFreeAdamW(options), [z, exp_avg_sq]) => {
                options.update(param, grad, z, exp_avg_sq)
            }
            (Algorithm::Adafactor(_) | Algorithm::Muon(_), _) => {
                return Err(AlgorithmError::NotElementwise {
                    algorithm: self.name(),
                });
            }
            _ => {
                let expected = self.slice_names().count();
                return Err(AlgorithmError::StateCount {
                    algorithm: self.name(),
                    expected,
                    found,
                });
            }
        }
        Ok(())
    }

    /// Begins a step of all parameters of a group: updates what the group itself keeps from step to
    /// step, which only schedule-free AdamW has.
    pub(crate) fn begin_step(&mut self) -> Result<(), AlgorithmError> {
        match self {
            Algorithm::ScheduleFreeAdamW(options) => options.begin_step(),
            _ => Ok(()),
        }
    }

    /// Ends a step of all parameters of a group.
    pub(crate) const fn end_step(&mut self) {
        if let Algorithm::ScheduleFreeAdamW(options) = self {
            options.k += 1;
        }
    }

    /// Checks that a parameter of this shape can be updated.
    pub(crate) fn check_shape(&self, shape: &[usize]) -> Result<(), AlgorithmError> {
        if matches!(self, Algorithm::Muon(_)) && shape.len() != 2 {
            return Err(AlgorithmError::NotAMatrix {
                algorithm: self.name(),
                shape: shape.to_vec(),
            });
        }
        Ok(())
    }

    /// Checks that the optimizer can step on the parameters that it sees: the model's own, or
    /// FlatParameters.
    pub(crate) const fn check_parameters(
        &self,
        use_orig_params: bool,
    ) -> Result<(), AlgorithmError> {
        match self {
            Algorithm::Adafactor(_) if !use_orig_params => Err(AlgorithmError::FlatParameters {
                algorithm: self.name(),
            }),
            _ => Ok(()),
        }
    }

    /// Checks the number of a step, from 1, for algorithms that have it in their state: they
    /// compute with it.
    pub(crate) fn check_step(&self, step: f32) -> Result<(), AlgorithmError> {
        if !self
            .state_entries()
            .any(|entry| entry.kind == StateKind::Scalar)
            || (step >= 1.0 && step.is_finite())
        {
            return Ok(());
        }
        Err(AlgorithmError::Step {
            algorithm: self.name(),
            step,
        })
    }

    /// Returns the names of the entries that an update takes slices of.
    fn slice_names(&self) -> impl Iterator<Item = &'static str> {
        self.state_entries()
            .filter(|entry| entry.kind == StateKind::LikeParameter)
            .map(|entry| entry.name)
    }
}

/// Checks that a slice of an update is as long as the parameter.
fn check_length(name: &'static str, found: usize, expected: usize) -> Result<(), AlgorithmError> {
    if found == expected {
        Ok(())
    } else {
        Err(AlgorithmError::Length {
            name,
            expected,
            found,
        })
    }
}
