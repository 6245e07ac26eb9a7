//! The optimizers that a run can have.

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
    /// Returns the name on the command line and in checkpoints.
    pub(super) const fn name(self) -> &'static str {
        match self {
            OptimizerName::Adamw => "adamw",
            OptimizerName::Adam => "adam",
            OptimizerName::Sgd => "sgd",
            OptimizerName::Adagrad => "adagrad",
            OptimizerName::Adafactor => "adafactor",
            OptimizerName::Muon => "muon",
            OptimizerName::ScheduleFree => "schedule-free",
        }
    }

    /// Makes the optimizer of a model.
    ///
    /// # Errors
    /// With `--flat`, those of Adafactor and Muon, which step on the model's own parameters.
    pub(super) fn make(
        self,
        lr: f64,
        parameters: &std::sync::Arc<ShardedParameters>,
    ) -> Result<Optimizer> {
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
fn with_muon(lr: f64, parameters: &std::sync::Arc<ShardedParameters>) -> Result<Optimizer> {
    let muon = MuonOptions {
        lr,
        adjust_lr_fn: Some(MuonAdjust::MatchRmsAdamw),
        ..MuonOptions::default()
    };
    let is_matrix = |fqn: &&str| {
        fqn.contains(".h.") && parameters.shape(fqn).is_ok_and(|shape| shape.len() == 2)
    };
    let (matrices, rest): (Vec<&str>, Vec<&str>) = parameters.fqns().partition(is_matrix);
    let groups = vec![
        ParamGroup::new(Algorithm::Muon(muon), matrices),
        ParamGroup::new(adamw(lr), rest),
    ];
    Ok(Optimizer::with_groups(parameters, groups)?)
}
