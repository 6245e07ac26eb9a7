//! DeepSpeed's directories: the shards of ZeRO 1 to 3, and the Universal Checkpoint.
//!
//! ```text
//! global_step20/
//!   mp_rank_00_model_states.pt                      ZeRO 1 and 2: names, shapes, buffers, the trainer's values
//!   zero_pp_rank_0_mp_rank_00_model_states.pt       ZeRO 3: the same, one a rank
//!   zero_pp_rank_0_mp_rank_00_optim_states.pt       one a rank: its part of the flat fp32 parameters and moments
//! global_step20_universal/
//!   mp_rank_00_model_states.pt
//!   zero/PARAMETER/{fp32,exp_avg,exp_avg_sq,step}.pt
//! ```
//!
//! The parameters are those that DeepSpeed's own `zero_to_fp32.py` makes: the fp32 copies, not the
//! 16-bit ones beside them. All tensors keep the dtype in which they are stored: a training may
//! have had its master parameters in 16 bits too. The tree is that of other checkpoints:
//!
//! | key | from |
//! |---|---|
//! | `model.NAME` | the fp32 parameter, frozen parameter or buffer, and all else in the model's state dict |
//! | `optim.state.NAME.exp_avg` and its like | the optimizer's state, cut as the parameter is |
//! | `optim.param_groups…`, `optim.…` | the optimizer's other values, of the first rank |
//! | any other | the values in the file of model states, of the first rank |
//!
//! The steps and hyperparameters in the files of all ranks are compared.

mod alike;
mod flat;
mod names;
mod state;
pub(crate) mod universal;
mod untrained;
pub(crate) mod zero;

pub(crate) use self::names::is_there;
