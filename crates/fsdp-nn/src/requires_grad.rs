//! The choice of the parameters that are trained, which may change between steps.

use fsdp_flat::FlatError;

use crate::agreement::agree_on_model;
use crate::handle::{FlatParamHandle, Parameter};
use crate::parameters::ShardedParameters;
use crate::{NnError, Result};

impl ShardedParameters {
    /// Chooses by name which parameters are trained from now on: torch's `requires_grad_`, for
    /// gradual unfreezing. The others are frozen: later backwards bring them no gradients, and
    /// optimizers leave them as they are. Only parameters that
    /// [`FsdpConfig::requires_grad`](crate::FsdpConfig::requires_grad) names can be trained at all.
    /// Gradients that are there stay; call it between [`Self::zero_grad`] and the next backward.
    /// Collectives: one agreement.
    ///
    /// # Errors
    /// [`NnError::BuiltFrozen`]; without `use_orig_params` a choice of some of a unit's parameters;
    /// [`NnError::DifferentModels`] if ranks choose differently. One rank's error is every rank's,
    /// and changes nothing.
    pub fn set_requires_grad(&self, requires_grad: impl Fn(&str) -> bool) -> Result<()> {
        let params = self.handles.iter().flat_map(|handle| &handle.params);
        let chosen: Vec<(&Parameter, bool)> = params
            .map(|param| (param, requires_grad(&param.fqn)))
            .collect();
        let checked = self.check_choice(&chosen).map(|()| chosen);
        let chosen = agree_on_model(self.group(), "set_requires_grad", checked, |chosen| {
            describe(chosen)
        })?;
        for (param, requires_grad) in chosen {
            param.set_requires_grad(requires_grad);
        }
        Ok(())
    }

    /// Checks a choice of the parameters to train: they must have been built as trainable, and
    /// without `use_orig_params` a unit's parameters must all be chosen or none.
    fn check_choice(&self, chosen: &[(&Parameter, bool)]) -> Result<()> {
        if let Some((param, _)) = chosen
            .iter()
            .find(|(param, requires_grad)| *requires_grad && !param.is_trainable)
        {
            return Err(NnError::BuiltFrozen {
                fqn: param.fqn.clone(),
            });
        }
        if self.use_orig_params() {
            return Ok(());
        }
        let mut rest = chosen;
        for handle in &self.handles {
            let of_unit;
            (of_unit, rest) = rest.split_at(handle.params.len());
            check_uniform(handle, of_unit)?;
        }
        Ok(())
    }
}

/// Checks that a FlatParameter is trained as a whole, or not at all.
fn check_uniform(handle: &FlatParamHandle, chosen: &[(&Parameter, bool)]) -> Result<()> {
    let first = chosen
        .first()
        .is_some_and(|(_, requires_grad)| *requires_grad);
    match chosen
        .iter()
        .position(|(_, requires_grad)| *requires_grad != first)
    {
        Some(param) => Err(FlatError::MixedRequiresGrad {
            fqn: handle.params[param].fqn.clone(),
        }
        .into()),
        None => Ok(()),
    }
}

/// Describes the trained and the frozen parameters in lines, which the ranks compare to check that
/// all made the same choice.
fn describe(chosen: &[(&Parameter, bool)]) -> Vec<String> {
    let lines = chosen.iter().map(|(param, requires_grad)| {
        let state = if *requires_grad { "trained" } else { "frozen" };
        format!("the parameter `{}` {state}", param.fqn)
    });
    lines.collect()
}
