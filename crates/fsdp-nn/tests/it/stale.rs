//! A backward of what was computed with other values is an error, whatever the forward returned and
//! however it is sharded.

use std::sync::atomic::{AtomicUsize, Ordering};

use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Linear, linear};
use fsdp_comm::run_local;
use fsdp_nn::algorithm::{Algorithm, SgdOptions};
use fsdp_nn::torch::{StateDictSettings, StateDictType, load_state_dict, state_dict};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, NnError, Optimizer, Scope, ShardingStrategy,
    StateDictError, Unit,
};

struct Layer(Linear);

impl Layer {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        linear(3, 3, scope.vb()).map(Layer)
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        self.0.forward(x)?.tanh()
    }
}

#[derive(Debug, Clone, Copy)]
enum Parts {
    /// All parameters are in units, and the root has none.
    Units,
    Root,
}

enum Net {
    Units(Vec<Unit<Layer>>),
    Plain(Vec<Layer>),
}

type Model = FullyShardedDataParallel<Net>;

impl Net {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        match self {
            Net::Units(layers) => layers
                .iter()
                .try_fold(x.clone(), |x, layer| layer.forward(&x)),
            Net::Plain(layers) => layers
                .iter()
                .try_fold(x.clone(), |x, layer| layer.forward(&x)),
        }
    }
}

/// Calls `check` with every model, and the loss of a forward that returns the loss itself or what
/// it is computed of.
fn with_each_loss(check: impl Fn(&Model, &Tensor, &str) + Sync) {
    for world in [1, 2] {
        for strategy in [ShardingStrategy::FullShard, ShardingStrategy::NoShard] {
            for parts in [Parts::Units, Parts::Root] {
                for returns_loss in [true, false] {
                    run_local(world, |group| {
                        let config = FsdpConfig {
                            strategy,
                            ..FsdpConfig::default()
                        };
                        let model = FullyShardedDataParallel::new(group, config, |scope| {
                            let scopes = (0..2).map(|index| scope.pp("layers").pp(index));
                            Ok(match parts {
                                Parts::Units => Net::Units(
                                    scopes
                                        .map(|s| s.unit(Layer::new))
                                        .collect::<Result<_, _>>()?,
                                ),
                                Parts::Root => Net::Plain(
                                    scopes.map(|s| Layer::new(&s)).collect::<Result<_, _>>()?,
                                ),
                            })
                        })
                        .unwrap();
                        let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
                        let mean = |y: Tensor| y.sqr()?.mean_all();
                        let loss = if returns_loss {
                            model.forward(|net| mean(net.forward(&x)?)).unwrap()
                        } else {
                            mean(model.forward(|net| net.forward(&x)).unwrap()).unwrap()
                        };
                        check(
                            &model,
                            &loss,
                            &format!("{world} ranks, {strategy}, {parts:?}, loss: {returns_loss}"),
                        );
                    })
                    .unwrap();
                }
            }
        }
    }
}

fn assert_refused(model: &Model, loss: &Tensor, what: &str) {
    let error = model.backward(loss).unwrap_err();
    assert!(
        matches!(error, NnError::ChangedSinceForward { .. }),
        "{what}: {error}"
    );
}

#[test]
fn after_a_step() {
    with_each_loss(|model, loss, what| {
        let mut optimizer =
            Optimizer::new(model.parameters(), Algorithm::Sgd(SgdOptions::default())).unwrap();
        model.backward(loss).unwrap();
        let x = Tensor::ones((2, 3), DType::F32, &Device::Cpu).unwrap();
        let stale = model
            .forward(|net| net.forward(&x))
            .unwrap()
            .sum_all()
            .unwrap();
        optimizer.step().unwrap();
        assert_refused(model, &stale, what);
    });
}

#[test]
fn after_a_parameter_was_set() {
    with_each_loss(|model, loss, what| {
        let parameters = model.parameters();
        let values = parameters.parameter("layers.1.weight").unwrap();
        parameters
            .set_parameter("layers.1.weight", &values)
            .unwrap();
        assert_refused(model, loss, what);
    });
}

#[test]
fn after_a_load_of_each_type() {
    for state_dict_type in [
        StateDictType::Full,
        StateDictType::Sharded,
        StateDictType::Local,
    ] {
        let refused = AtomicUsize::new(0);
        with_each_loss(|model, loss, what| {
            let parameters = model.parameters();
            let loaded =
                parameters.state_dict_type(StateDictSettings::from(state_dict_type), || {
                    let state = state_dict(parameters)?;
                    load_state_dict(&state, parameters, true)
                });
            // Only what is sharded has a local state dict.
            if matches!(
                loaded,
                Err(NnError::StateDict(StateDictError::LocalWithoutSharding))
            ) {
                return;
            }
            loaded.unwrap();
            assert_refused(model, loss, &format!("{state_dict_type:?}, {what}"));
            refused.fetch_add(1, Ordering::Relaxed);
        });
        // Both strategies on one rank and on two; a local one with full sharding on two.
        let expected = if state_dict_type == StateDictType::Local {
            2
        } else {
            6
        };
        assert_eq!(
            refused.into_inner(),
            expected * 2 * 2,
            "{state_dict_type:?}"
        );
    }
}
