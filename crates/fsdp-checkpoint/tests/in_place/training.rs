//! A small model of two units, with a parameter that has no dimensions, and its optimizer.

use candle_core::{Device, Tensor};
use candle_nn::{Init, Linear, Module, linear};
use fsdp_checkpoint::{StateDictOptions, get_state_dict};
use fsdp_comm::ProcessGroup;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, Optimizer, Unit};
use fsdp_state::StateDict;

pub(crate) type Model = FullyShardedDataParallel<(Unit<Linear>, Linear, Tensor)>;

pub(crate) fn adamw() -> Algorithm {
    Algorithm::AdamW(AdamOptions { lr: 0.01, ..AdamOptions::adamw() })
}

pub(crate) fn new_model(
    group: &ProcessGroup,
    use_orig_params: bool,
    algorithm: &Algorithm,
    seed: u64,
) -> (Model, Optimizer) {
    let config = FsdpConfig { use_orig_params, seed, ..FsdpConfig::default() };
    let model = FullyShardedDataParallel::new(group.clone(), config, |scope| {
        let scale = scope.vb().get_with_hints((), "scale", Init::Const(1.5))?;
        Ok((scope.pp("a").unit(|scope| linear(5, 7, scope.vb()))?, linear(7, 2, scope.vb().pp("head"))?, scale))
    });
    let model = model.unwrap();
    let optimizer = Optimizer::new(model.parameters(), algorithm.clone()).unwrap();
    (model, optimizer)
}

pub(crate) fn step(model: &Model, optimizer: &mut Optimizer, seed: usize) -> f32 {
    let x: Vec<f32> = (0..10).map(|i| ((i * 37 + seed * 11) % 17) as f32 / 8.0 - 1.0).collect();
    let x = Tensor::from_vec(x, (2, 5), &Device::Cpu).unwrap();
    let loss =
        model.forward(|m| m.1.forward(&m.0.forward(&x)?.tanh()?)?.broadcast_mul(&m.2)?.sqr()?.mean_all()).unwrap();
    model.backward(&loss).unwrap();
    optimizer.step().unwrap();
    model.parameters().zero_grad();
    loss.to_scalar().unwrap()
}

/// A state dict of both, as checkpoints hold it.
pub(crate) fn both(model: StateDict, optim: StateDict) -> StateDict {
    [("model", model.into()), ("optim", optim.into())].into_iter().collect()
}

/// Options for views of the live values.
pub(crate) fn shared() -> StateDictOptions {
    StateDictOptions { share_storage: true, ..StateDictOptions::default() }
}

/// Views of the live values.
pub(crate) fn views(model: &Model, optimizer: &Optimizer) -> StateDict {
    let (model, optim) = get_state_dict(model.parameters(), &[optimizer], &shared()).unwrap();
    both(model, optim)
}
