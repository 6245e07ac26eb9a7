//! Parameters that get no gradient: optimizers leave them alone, and a warning names them.

use tracing::warn;

use crate::Result;
use crate::parameters::ShardedParameters;

/// The most parameters that the warning names.
const NAMED: usize = 8;

impl ShardedParameters {
    /// Returns `true` if the parameter has got a gradient on any rank since the last
    /// [`Self::zero_grad`]. One that the loss does not depend on, or only through operations
    /// without a backward, has none: its [`Self::gradient`] is zero where its unit has gradients,
    /// and optimizers leave it as it is. No communication.
    ///
    /// The ranks agree on it in
    /// [`FullyShardedDataParallel::backward`](crate::FullyShardedDataParallel::backward).
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`](crate::NnError::UnknownParameter).
    pub fn has_gradient(&self, fqn: &str) -> Result<bool> {
        let location = self.location(fqn)?;
        Ok(self.handles[location.handle].has_gradient(location.param))
    }

    /// Records which parameters got a gradient on any rank, and warns, once, of those without one.
    /// No communication.
    pub(crate) fn set_has_gradient(&self, has_gradient: &[bool]) {
        let mut rest = has_gradient;
        for handle in &self.handles {
            let of_unit;
            (of_unit, rest) = rest.split_at(handle.params.len());
            handle.set_has_gradient(of_unit.to_vec());
        }
        // Every rank has the same result, so one warning is enough.
        if self.shared.begin_look_for_unreached() && self.group().rank() == 0 {
            self.warn_of_unreached(has_gradient);
        }
    }

    /// Warns of trained parameters that got no gradient. `has_gradient` is in the order of all
    /// parameters.
    fn warn_of_unreached(&self, has_gradient: &[bool]) {
        let params = self
            .handles
            .iter()
            .flat_map(|handle| &handle.params)
            .zip(has_gradient);
        let unreached =
            params.filter(|(param, has_gradient)| param.requires_grad() && !**has_gradient);
        let unreached: Vec<&str> = unreached.map(|(param, _)| param.fqn.as_str()).collect();
        if unreached.is_empty() {
            return;
        }
        let mut names = unreached
            .iter()
            .take(NAMED)
            .map(|fqn| format!("`{fqn}`"))
            .collect::<Vec<_>>()
            .join(", ");
        if unreached.len() > NAMED {
            names += &format!(" and {} more", unreached.len() - NAMED);
        }
        warn!(
            "no gradient comes to {} of the trained parameters, which stay as they are: {names}. Either the loss does not \
             depend on them, or an operation without a backward cuts their gradients off: candle's fused ones \
             (softmax_last_dim, RmsNorm, LayerNorm, rope, sdpa) have none, those of `fsdp_ops` do",
            unreached.len()
        );
    }
}
