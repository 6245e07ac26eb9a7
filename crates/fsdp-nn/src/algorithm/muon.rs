//! `torch.optim.Muon`: momentum whose direction is made orthogonal, for weights that are matrices.

use fsdp_layout::PlainValue;

use super::error::{AlgorithmError, check_at_least_zero, check_range};
use super::float::{Element, Float, Weight, scalar};
use super::group::{Reader, make_group, tuple_items};
use super::state::{StateEntries, StateEntry};

/// The way in which Muon fits the learning rate to the shape of a matrix of A rows and B columns:
/// torch's `adjust_lr_fn`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum MuonAdjust {
    /// `original`, the default: times the root of A / B, if that is more than 1.
    Original,
    /// `match_rms_adamw`: times 0.2 roots of the larger of A and B, so that learning rates of AdamW
    /// fit.
    MatchRmsAdamw,
    /// `spectral_unclamped`: times the root of A / B.
    SpectralUnclamped,
}

impl MuonAdjust {
    const ALL: [MuonAdjust; 3] = [
        MuonAdjust::Original,
        MuonAdjust::MatchRmsAdamw,
        MuonAdjust::SpectralUnclamped,
    ];

    /// Returns torch's name.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            MuonAdjust::Original => "original",
            MuonAdjust::MatchRmsAdamw => "match_rms_adamw",
            MuonAdjust::SpectralUnclamped => "spectral_unclamped",
        }
    }
}

/// Hyperparameters of Muon; the defaults are torch's. Its parameters must be matrices. Others, and
/// embeddings, are usually left to AdamW.
#[derive(Debug, Clone, PartialEq)]
pub struct MuonOptions {
    /// The learning rate; 1e-3 by default.
    pub lr: f64,
    /// The weight decay: the parameter shrinks by `lr` times this at each step; 0.1 by default.
    pub weight_decay: f64,
    /// The momentum factor; 0.95 by default.
    pub momentum: f64,
    /// `true` (the default) for Nesterov momentum.
    pub nesterov: bool,
    /// The coefficients of the polynomial that makes a matrix orthogonal; (3.4445, -4.775, 2.0315)
    /// by default.
    pub ns_coefficients: (f64, f64, f64),
    /// The least norm by which a matrix is divided; 1e-7 by default.
    pub eps: f64,
    /// The number of times that the polynomial is applied; 5 by default.
    pub ns_steps: u64,
    /// The fit of the learning rate to the matrix; `None` is [`MuonAdjust::Original`].
    pub adjust_lr_fn: Option<MuonAdjust>,
}

impl Default for MuonOptions {
    fn default() -> Self {
        Self {
            lr: 1e-3,
            weight_decay: 0.1,
            momentum: 0.95,
            nesterov: true,
            ns_coefficients: (3.4445, -4.7750, 2.0315),
            eps: 1e-7,
            ns_steps: 5,
            adjust_lr_fn: None,
        }
    }
}

/// The most times that the polynomial is applied.
const MAX_STEPS: u64 = 99;

impl MuonOptions {
    /// Checks the hyperparameters, and refuses those that are out of range.
    pub(super) fn validate(&self, algorithm: &'static str) -> Result<(), AlgorithmError> {
        let Self {
            lr,
            weight_decay,
            momentum,
            eps,
            ns_coefficients: (a, b, c),
            ns_steps,
            ..
        } = *self;
        check_at_least_zero(
            algorithm,
            &[
                ("lr", lr),
                ("weight_decay", weight_decay),
                ("momentum", momentum),
                ("eps", eps),
            ],
        )?;
        let sum = a + b + c;
        check_range(algorithm, "ns_coefficients", sum, sum.is_finite(), "finite")?;
        check_range(
            algorithm,
            "ns_steps",
            ns_steps as f64,
            ns_steps <= MAX_STEPS,
            "less than 100",
        )
    }

    /// Returns the hyperparameters under torch's keys, in torch's order and types.
    pub(super) fn to_group(&self) -> Vec<(String, PlainValue)> {
        let (a, b, c) = self.ns_coefficients;
        let adjust = self
            .adjust_lr_fn
            .map_or(PlainValue::None, |adjust| adjust.name().to_owned().into());
        make_group([
            ("lr", self.lr.into()),
            ("weight_decay", self.weight_decay.into()),
            ("momentum", self.momentum.into()),
            ("nesterov", self.nesterov.into()),
            (
                "ns_coefficients",
                PlainValue::Tuple(vec![a.into(), b.into(), c.into()]),
            ),
            ("eps", self.eps.into()),
            ("ns_steps", self.ns_steps.cast_signed().into()),
            ("adjust_lr_fn", adjust),
        ])
    }

    /// Returns these options with the hyperparameters that a group has in their place.
    pub(super) fn read(&self, reader: &mut Reader<'_>) -> Result<Self, AlgorithmError> {
        Ok(Self {
            lr: reader.read_float("lr", self.lr)?,
            weight_decay: reader.read_float("weight_decay", self.weight_decay)?,
            momentum: reader.read_float("momentum", self.momentum)?,
            nesterov: reader.read_bool("nesterov", self.nesterov)?,
            ns_coefficients: reader.read(
                "ns_coefficients",
                self.ns_coefficients,
                "a tuple of three floats",
                read_triple,
            )?,
            eps: reader.read_float("eps", self.eps)?,
            ns_steps: reader.read_count("ns_steps", self.ns_steps)?,
            adjust_lr_fn: reader.read(
                "adjust_lr_fn",
                self.adjust_lr_fn,
                "None or the name of a function",
                read_adjust,
            )?,
        })
    }

    /// Returns the state entries of a parameter, in torch's order.
    pub(super) fn state_entries(&self) -> StateEntries {
        [
            Some(StateEntry::like_parameter("momentum_buffer", 0.0)),
            None,
            None,
            None,
        ]
    }

    /// Returns the direction of a piece of a parameter that is to be made orthogonal, from the
    /// momentum before the update; slices of equal length.
    pub(crate) fn direction<T: Float>(&self, grads: &[T], buffers: &[T]) -> Vec<T> {
        let gradient_weight = Weight::new(1.0 - self.momentum);
        let lookahead_weight = Weight::new(self.momentum);
        let elements = grads.iter().zip(buffers).map(|(&grad, &buffer)| {
            let g = Element::load(grad);
            // The momentum after the update.
            let b = Element::load(buffer).lerp(g, gradient_weight);
            if self.nesterov {
                g.lerp(b, lookahead_weight).store()
            } else {
                b.store()
            }
        });
        elements.collect()
    }

    /// Steps a piece of a parameter of this shape along an orthogonal direction; slices of equal
    /// length.
    pub(crate) fn descend<T: Float>(
        &self,
        shape: [usize; 2],
        params: &mut [T],
        direction: &[half::bf16],
    ) {
        // The decay does not follow the shape of the matrix, the step does.
        let decay_factor = scalar::<T>(1.0 - self.lr * self.weight_decay);
        let descent = Element::<T>::from_scalar(-self.adjusted_lr(shape));
        for (param, &direction) in params.iter_mut().zip(direction) {
            let direction = Element::from_scalar(direction.to_f64());
            *param = Element::load(*param)
                .mul(decay_factor)
                .add_scaled(direction, descent)
                .store();
        }
    }

    /// Returns the learning rate for a matrix, adjusted to its shape as torch's `adjust_lr_fn`
    /// says.
    pub(crate) fn adjusted_lr(&self, [rows, columns]: [usize; 2]) -> f64 {
        let [rows, columns] = [rows, columns].map(|size| size as f64);
        self.lr
            * match self.adjust_lr_fn.unwrap_or(MuonAdjust::Original) {
                MuonAdjust::Original => (rows / columns).max(1.0).sqrt(),
                MuonAdjust::MatchRmsAdamw => 0.2 * rows.max(columns).sqrt(),
                MuonAdjust::SpectralUnclamped => (rows / columns).sqrt(),
            }
    }
}

/// Reads a tuple of three floats. Returns `None` for anything else.
fn read_triple(value: &PlainValue) -> Option<(f64, f64, f64)> {
    let [a, b, c] = tuple_items(value)?;
    Some((a.as_float()?, b.as_float()?, c.as_float()?))
}

/// Reads `None`, or the name of a rule. Returns `None` for anything else.
fn read_adjust(value: &PlainValue) -> Option<Option<MuonAdjust>> {
    if matches!(value, PlainValue::None) {
        return Some(None);
    }
    let name = value.as_str()?;
    MuonAdjust::ALL
        .into_iter()
        .find(|adjust| adjust.name() == name)
        .map(Some)
}
