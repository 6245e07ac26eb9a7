//! The optimizers that a run can have.

use std::sync::Arc;

use anyhow::Result;
use clap::ValueEnum;
use fsdp::nn::ParamGroup;
use fsdp::nn::algorithm::{AdafactorOptions, MuonAdjust, MuonOptions, ScheduleFreeOptions};
use fsdp::prelude::*;

/// The optimizers, with torch's defaults.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum OptimizerName {
    Adamw,
    Adam,
    Sgd,
    Adagrad,
    Adafactor,
    Muon,
    ScheduleFree,
}

impl OptimizerName {
    /// Returns `true` if it steps on the model's own parameters, and not on joined ones.
    pub(super) const fn needs_original_parameters(self) -> bool {
        matches!(self, OptimizerName::Adafactor | OptimizerName::Muon)
    }

    /// Makes the optimizer of a model.
    ///
    /// # Errors
    /// The errors of [`Optimizer::new`] and [`Optimizer::with_groups`].
    pub(super) fn make(self, lr: f64, parameters: &Arc<ShardedParameters>) -> Result<Optimizer> {
        let algorithm = match self {
            OptimizerName::Muon => return with_muon(lr, parameters),
            OptimizerName::Adamw => adamw(lr),
            OptimizerName::Adam => Algorithm::Adam(AdamOptions {
                lr,
                ..AdamOptions::default()
            }),
            OptimizerName::Sgd => Algorithm::Sgd(SgdOptions {
                lr,
                ..SgdOptions::default()
            }),
            OptimizerName::Adagrad => Algorithm::Adagrad(AdagradOptions {
                lr,
                ..AdagradOptions::default()
            }),
            OptimizerName::Adafactor => Algorithm::Adafactor(AdafactorOptions {
                lr,
                ..AdafactorOptions::default()
            }),
            OptimizerName::ScheduleFree => Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions {
                lr,
                ..ScheduleFreeOptions::default()
            }),
        };
        Ok(Optimizer::new(parameters, algorithm)?)
    }
}

fn adamw(lr: f64) -> Algorithm {
    Algorithm::AdamW(AdamOptions {
        lr,
        ..AdamOptions::adamw()
    })
}

/// Makes an optimizer that steps the matrices of the blocks by Muon, and the rest by AdamW, at one
/// learning rate.
fn with_muon(lr: f64, parameters: &Arc<ShardedParameters>) -> Result<Optimizer> {
    // With this adjustment both algorithms move weights alike, so one learning rate does for both.
    let muon = MuonOptions {
        lr,
        adjust_lr_fn: Some(MuonAdjust::MatchRmsAdamw),
        ..MuonOptions::default()
    };
    // Embeddings and the output layer are matrices too, but Muon is for those inside of the model.
    let (matrices, other_parameters): (Vec<&str>, Vec<&str>) = parameters.fqns().partition(|fqn| {
        fqn.contains(".h.") && parameters.shape(fqn).is_ok_and(|shape| shape.len() == 2)
    });
    let groups = vec![
        ParamGroup::new(Algorithm::Muon(muon), matrices),
        ParamGroup::new(adamw(lr), other_parameters),
    ];
    Ok(Optimizer::with_groups(parameters, groups)?)
}
