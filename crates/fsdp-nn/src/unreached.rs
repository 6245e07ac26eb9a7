//! Parameters that get no gradient: optimizers leave them alone, and a warning names them.

use fsdp_comm::ReduceOp;
use tracing::warn;

use crate::Result;
use crate::parameters::ShardedParameters;

/// The most parameters that the warning names.
const NAMED: usize = 8;

impl ShardedParameters {
    /// Returns `true` if a gradient has come to the parameter, on any rank, since gradients were last forgotten. One that
    /// the loss does not depend on, or only through operations without a backward, has none: its [`Self::gradient`] is zero
    /// where its unit has gradients, and optimizers leave it as it is. No communication.
    ///
    /// The ranks agree on it in [`FullyShardedDataParallel::backward`](crate::FullyShardedDataParallel::backward). After a
    /// `loss.backward()` without that, all parameters of a unit count as having a gradient if any has.
    ///
    /// # Errors
    /// [`NnError::UnknownParameter`](crate::NnError::UnknownParameter).
    pub fn has_gradient(&self, fqn: &str) -> Result<bool> {
        let location = self.location(fqn)?;
        Ok(self.handles[location.handle].has_gradient(location.param))
    }

    /// Tells all ranks which parameters a gradient has come to on any of them, and warns, once, of those without one.
    /// Collectives: one all-reduce of a byte for each parameter.
    pub(crate) fn agree_on_gradients(&self) -> Result<()> {
        let touched = self.handles.iter().flat_map(|handle| handle.touched());
        let mut touched: Vec<u8> = touched.map(u8::from).collect();
        if self.group().world_size() > 1 {
            self.group().all_reduce(&mut touched, ReduceOp::Max)?;
        }
        let mut rest = touched.as_slice();
        for handle in &self.handles {
            let of_unit;
            (of_unit, rest) = rest.split_at(handle.params.len());
            handle.set_has_gradient(of_unit.iter().map(|&touched| touched != 0).collect());
        }
        // Every rank has the same result, so one warning is enough.
        if self.shared.begin_look_for_unreached() && self.group().rank() == 0 {
            self.warn_of_unreached(&touched);
        }
        Ok(())
    }

    fn warn_of_unreached(&self, touched: &[u8]) {
        let params = self.handles.iter().flat_map(|handle| &handle.params).zip(touched);
        let unreached = params.filter(|(param, touched)| param.requires_grad() && **touched == 0);
        let unreached: Vec<&str> = unreached.map(|(param, _)| param.fqn.as_str()).collect();
        if unreached.is_empty() {
            return;
        }
        let mut names = unreached.iter().take(NAMED).map(|fqn| format!("`{fqn}`")).collect::<Vec<_>>().join(", ");
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
