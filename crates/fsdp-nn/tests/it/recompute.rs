//! Parts that are computed again in the backward: the same bits as without, whatever the ranks,
//! strategy and precision.

use std::sync::Arc;

use candle_core::{DType, Device, Tensor, Var};
use candle_nn::{Linear, Module, linear};
use fsdp_comm::{ProcessGroup, run_local};
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::{AdamOptions, Algorithm};
use fsdp_nn::{
    FsdpConfig, FullyShardedDataParallel, MixedPrecision, NnError, Optimizer, Recomputed, Scope,
    ShardingStrategy, Unit, recompute,
};
use fsdp_ops::DropoutMasks;

/// The way in which layers are recomputed.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Way {
    Not,
    Inside,
    Around,
    /// Both, one in the other.
    Nested,
    /// Two units in one part.
    Pairs,
}

/// A layer with a residual and a norm of its own.
struct Layer {
    up: Linear,
    down: Linear,
}

impl Layer {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        Ok(Layer {
            up: linear(6, 10, scope.vb().pp("up"))?,
            down: linear(10, 6, scope.vb().pp("down"))?,
        })
    }
}

impl Module for Layer {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        x + self.down.forward(&self.up.forward(x)?.tanh()?)?
    }
}

type Inner = Unit<Recomputed<Layer>>;

struct Net {
    embed: Linear,
    layers: Vec<Arc<Recomputed<Inner>>>,
    head: Linear,
    way: Way,
}

impl Net {
    fn new(scope: &Scope, way: Way) -> candle_core::Result<Self> {
        let layer = |index: usize| -> candle_core::Result<Arc<Recomputed<Inner>>> {
            let inside = matches!(way, Way::Inside | Way::Nested);
            let unit = scope.pp("layers").pp(index);
            let unit = unit.unit(|scope| Ok(Recomputed::when(inside, Layer::new(scope)?)))?;
            Ok(Arc::new(Recomputed::when(
                matches!(way, Way::Around | Way::Nested),
                unit,
            )))
        };
        Ok(Net {
            embed: linear(3, 6, scope.vb().pp("embed"))?,
            layers: (0..4).map(layer).collect::<candle_core::Result<_>>()?,
            head: linear(6, 2, scope.vb().pp("head"))?,
            way,
        })
    }

    fn loss(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let mut h = self.embed.forward(x)?;
        if self.way == Way::Pairs {
            for pair in self.layers.chunks(2) {
                let [first, second] = [Arc::clone(&pair[0]), Arc::clone(&pair[1])];
                h = recompute(&[&h], move |h| second.forward(&first.forward(&h[0])?))?;
            }
        } else {
            for layer in &self.layers {
                h = layer.forward(&h)?;
            }
        }
        // The first layer a second time: its weights have two uses.
        let h = self.layers[0].forward(&h)?;
        self.head
            .forward(&h)?
            .to_dtype(DType::F32)?
            .sqr()?
            .mean_all()
    }
}

/// The bits of losses, gradients and parameters of three steps.
fn train(group: &ProcessGroup, config: FsdpConfig, way: Way) -> Vec<u32> {
    let model =
        FullyShardedDataParallel::new(group.clone(), config, |scope| Net::new(scope, way)).unwrap();
    let adamw = Algorithm::AdamW(AdamOptions {
        lr: 0.01,
        ..AdamOptions::adamw()
    });
    let mut optimizer = Optimizer::new(model.parameters(), adamw).unwrap();
    let dtype = model
        .forward(|net| Ok(net.embed.weight().clone()))
        .unwrap()
        .dtype();
    let mut bits = Vec::new();
    for step in 0..3 {
        let x: Vec<f32> = (0..12)
            .map(|i| ((i * 7 + step * 5 + group.rank() * 3) % 11) as f32 / 5.0 - 1.0)
            .collect();
        let x = Tensor::from_vec(x, (4, 3), &Device::Cpu)
            .unwrap()
            .to_dtype(dtype)
            .unwrap();
        let loss = model.forward(|net| net.loss(&x)).unwrap();
        model.backward(&loss).unwrap();
        bits.push(loss.to_scalar::<f32>().unwrap().to_bits());
        let parameters = model.parameters();
        for fqn in parameters.fqns() {
            bits.push(u32::from(parameters.has_gradient(fqn).unwrap()));
            for piece in [
                parameters.gradient(fqn).unwrap(),
                Some(parameters.parameter(fqn).unwrap()),
            ] {
                for shard in piece.iter().flat_map(|piece| piece.shards()) {
                    let values = shard
                        .tensor
                        .flatten_all()
                        .unwrap()
                        .to_dtype(DType::F32)
                        .unwrap();
                    bits.extend(
                        values
                            .to_vec1::<f32>()
                            .unwrap()
                            .into_iter()
                            .map(f32::to_bits),
                    );
                }
            }
        }
        optimizer.step().unwrap();
        model.parameters().zero_grad();
    }
    bits
}

fn config(strategy: ShardingStrategy, world: usize) -> FsdpConfig {
    let replicas = if world.is_multiple_of(2) { 2 } else { 1 };
    let mesh = DeviceMesh::new(
        &[replicas, world / replicas],
        &["replicate", "shard"],
        world,
    )
    .unwrap();
    FsdpConfig {
        strategy,
        mesh: Some(mesh),
        seed: 3,
        ..FsdpConfig::default()
    }
}

/// Checks that every way gives the bits of none.
fn check(world: usize, config: &FsdpConfig, what: &str) {
    let expected = run_local(world, |group| train(&group, config.clone(), Way::Not)).unwrap();
    for way in [Way::Inside, Way::Around, Way::Nested, Way::Pairs] {
        let found = run_local(world, |group| train(&group, config.clone(), way)).unwrap();
        assert_eq!(found, expected, "{what} on {world} ranks, {way:?}");
    }
}

#[test]
fn losses_gradients_and_weights_have_the_bits_of_a_model_that_keeps_its_activations() {
    for world in 1..=4 {
        for strategy in ShardingStrategy::ALL {
            check(world, &config(strategy, world), &strategy.to_string());
        }
    }
}

#[test]
fn mixed_precision_and_frozen_weights_make_no_difference() {
    for world in [1, 2] {
        let mixed_precision = MixedPrecision {
            param: Some(DType::BF16),
            reduce: Some(DType::F32),
            cast_inputs: true,
            ..MixedPrecision::default()
        };
        check(
            world,
            &FsdpConfig {
                mixed_precision,
                ..config(ShardingStrategy::FullShard, world)
            },
            "bf16",
        );
        let frozen = |name: &str| !name.contains("up.weight") && !name.starts_with("layers.2");
        let config = FsdpConfig {
            requires_grad: Arc::new(frozen),
            ..config(ShardingStrategy::FullShard, world)
        };
        check(world, &config, "frozen");
    }
}

#[test]
fn a_unit_around_a_recomputed_module_is_gathered_as_often_as_without() {
    let bytes = |way: Way| {
        let moved = run_local(2, |group| {
            let model =
                FullyShardedDataParallel::new(group.clone(), FsdpConfig::default(), |scope| {
                    Net::new(scope, way)
                })
                .unwrap();
            let before = group.traffic();
            let x = Tensor::ones((4, 3), DType::F32, &Device::Cpu).unwrap();
            let loss = model.forward(|net| net.loss(&x)).unwrap();
            model.backward(&loss).unwrap();
            group.traffic().since(&before).tensor_bytes()
        });
        moved.unwrap()
    };
    assert_eq!(bytes(Way::Inside), bytes(Way::Not));
    assert!(bytes(Way::Around) > bytes(Way::Not));
}

#[test]
fn variables_that_belong_to_no_sharded_model_get_their_gradients() {
    let var = |seed: usize| {
        let values: Vec<f32> = (0..9)
            .map(|i| ((i * 5 + seed) % 7) as f32 / 3.0 - 1.0)
            .collect();
        Var::from_vec(values, (3, 3), &Device::Cpu).unwrap()
    };
    let (weight, x, unused) = (var(1), var(2), var(3));
    let gradients = |is_recomputed: bool| {
        let held = weight.as_tensor().clone();
        let f = move |inputs: &[Tensor]| inputs[0].matmul(&held)?.tanh()?.matmul(&held);
        let inputs = [x.as_tensor(), unused.as_tensor()];
        let y = if is_recomputed {
            recompute(&inputs, f).unwrap()
        } else {
            f(&inputs.map(Clone::clone)).unwrap()
        };
        let store = (y.sqr().unwrap().sum_all().unwrap() + x.sum_all().unwrap())
            .unwrap()
            .backward()
            .unwrap();
        [&weight, &x, &unused].map(|var| store.get(var).map(|grad| grad.to_vec2::<f32>().unwrap()))
    };
    assert_eq!(gradients(true), gradients(false));
    assert_eq!(gradients(true)[2], None);
}

#[test]
fn a_change_of_values_before_the_backward_is_an_error() {
    for way in [Way::Inside, Way::Around] {
        run_local(2, |group| {
            let model = FullyShardedDataParallel::new(group, FsdpConfig::default(), |scope| {
                Net::new(scope, way)
            })
            .unwrap();
            let x = Tensor::ones((4, 3), DType::F32, &Device::Cpu).unwrap();
            let loss = model.forward(|net| net.loss(&x)).unwrap();
            let parameters = model.parameters();
            let values = parameters.parameter("layers.1.up.weight").unwrap();
            parameters
                .set_parameter("layers.1.up.weight", &values)
                .unwrap();
            let error = model.backward(&loss).unwrap_err();
            assert!(
                matches!(error, NnError::ChangedSinceForward { .. }),
                "{way:?}: {error}"
            );
        })
        .unwrap();
    }
}

#[test]
fn a_part_that_computes_something_else_the_second_time_is_an_error() {
    let weight = Var::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
    for change in 0..2 {
        let calls = std::sync::atomic::AtomicUsize::new(0);
        let held = weight.as_tensor().clone();
        let f = move |x: &[Tensor]| {
            let is_first = calls.fetch_add(1, std::sync::atomic::Ordering::Relaxed) == 0;
            match (is_first, change) {
                (true, _) => x[0].matmul(&held),
                (false, 0) => x[0].matmul(&held)?.narrow(0, 0, 1),
                (false, _) => x[0].matmul(&held.detach()),
            }
        };
        let x = Var::ones((2, 2), DType::F32, &Device::Cpu).unwrap();
        let loss = recompute(&[x.as_tensor()], f).unwrap().sum_all().unwrap();
        let error = loss.backward().unwrap_err().to_string();
        assert!(error.contains("something else"), "{error}");
    }
}

#[test]
fn a_part_whose_second_dropout_has_another_mask_is_an_error() {
    let x = Var::ones((8, 8), DType::F32, &Device::Cpu).unwrap();
    let loss = |f: &'static (dyn Fn(&Tensor) -> candle_core::Result<Tensor> + Send + Sync)| {
        let dropped = recompute(&[x.as_tensor()], move |inputs| f(&inputs[0]));
        dropped.unwrap().sum_all().unwrap()
    };
    let error = loss(&|x| candle_nn::ops::dropout(x, 0.5)).backward();
    let error = error.unwrap_err().to_string();
    assert!(error.contains("`fsdp_ops::dropout`"), "{error}");
    // That one has the same mask. Views and numbers that are not finite are compared too.
    let same = loss(&|x| {
        let dropped = fsdp_ops::dropout(&x.t()?, 0.5, DropoutMasks::new(1, 0, 0))?;
        (dropped * f64::NAN)?.t()
    });
    same.backward().unwrap();
}
