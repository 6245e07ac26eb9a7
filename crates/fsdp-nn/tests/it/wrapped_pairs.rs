//! Operations that read weights of two units by name pattern at once: nobody waits for ever, and
//! ranks gather alike.

use candle_core::{CpuStorage, CustomOp3, Layout, Shape, Tensor};
use fsdp_comm::{Operation, run_local};
use fsdp_nn::{FsdpConfig, FullyShardedDataParallel, ShardingStrategy};

const WIDTH: usize = 8;

fn config(strategy: ShardingStrategy) -> FsdpConfig {
    FsdpConfig {
        strategy,
        seed: 4,
        ..FsdpConfig::default()
    }
}

/// The sum of three tensors, which all are read at once.
struct Sum3;

impl CustomOp3 for Sum3 {
    fn name(&self) -> &'static str {
        "sum of three"
    }

    fn cpu_fwd(
        &self,
        a: &CpuStorage,
        shape: &Layout,
        b: &CpuStorage,
        _: &Layout,
        c: &CpuStorage,
        _: &Layout,
    ) -> candle_core::Result<(CpuStorage, Shape)> {
        let [a, b, c] = [a, b, c].map(|storage| storage.as_slice::<f32>());
        let sum = a?
            .iter()
            .zip(b?)
            .zip(c?)
            .map(|((a, b), c)| a + b + c)
            .collect();
        Ok((CpuStorage::F32(sum), shape.shape().clone()))
    }

    fn bwd(
        &self,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        _: &Tensor,
        grad: &Tensor,
    ) -> candle_core::Result<(Option<Tensor>, Option<Tensor>, Option<Tensor>)> {
        Ok((Some(grad.clone()), Some(grad.clone()), Some(grad.clone())))
    }
}

/// Two units of two weights each.
type Pairs = [[Tensor; 2]; 2];

/// Compares what is computed with two wrapped units with the same without units, and the gathers of
/// the ranks. `compute` gets the rank too.
fn check_pairs(compute: fn(&Pairs, usize) -> candle_core::Result<Tensor>) {
    for strategy in [ShardingStrategy::FullShard, ShardingStrategy::ShardGradOp] {
        let gathers = run_local(2, |group| {
            let build = |scope: &fsdp_nn::Scope| {
                let weight = |unit: usize, name: &str| {
                    let init = candle_nn::init::DEFAULT_KAIMING_NORMAL;
                    scope
                        .vb()
                        .pp("layers")
                        .pp(unit)
                        .get_with_hints((WIDTH, WIDTH), name, init)
                };
                Ok([
                    [weight(0, "a")?, weight(0, "b")?],
                    [weight(1, "a")?, weight(1, "b")?],
                ])
            };
            let whole =
                FullyShardedDataParallel::new(group.clone(), config(strategy), build).unwrap();
            let wrapped = FullyShardedDataParallel::new(
                group.clone(),
                config(strategy).wrap("layers.*"),
                build,
            )
            .unwrap();
            let before = group.traffic();
            for _ in 0..2 {
                let [expected, found] = [&whole, &wrapped].map(|model| {
                    let loss = model
                        .forward(|pairs| compute(pairs, group.rank())?.sqr()?.sum_all())
                        .unwrap();
                    model.backward(&loss).unwrap();
                    loss.to_scalar::<f32>().unwrap()
                });
                assert_eq!(found, expected, "{strategy}");
                for fqn in ["layers.0.a", "layers.0.b", "layers.1.a", "layers.1.b"] {
                    let [expected, found] = [&whole, &wrapped].map(|model| {
                        let gradient = model.parameters().gradient(fqn).unwrap().unwrap();
                        let shards = gradient.shards().iter();
                        shards
                            .map(|shard| shard.tensor.flatten_all().unwrap().to_vec1().unwrap())
                            .collect::<Vec<_>>()
                    });
                    let pairs = found.concat().into_iter().zip(expected.concat());
                    pairs.for_each(|(found, expected): (f32, f32)| {
                        assert!((found - expected).abs() < 1e-4, "{fqn}")
                    });
                }
            }
            group.traffic().since(&before).count(Operation::AllGather)
        });
        let gathers = gathers.unwrap();
        assert_eq!(gathers[0], gathers[1], "{strategy}: ranks gather alike");
    }
}

#[test]
fn an_operation_may_read_a_unit_again_after_another_one() {
    // The locks of a unit are taken in one order, so one of these two operations reads its weights
    // in the opposite order.
    check_pairs(|[[a, b], [c, _]], _| a.apply_op3(c, b, Sum3));
    check_pairs(|[[a, b], [c, _]], _| b.apply_op3(c, a, Sum3));
    // The same weight twice.
    check_pairs(|[[a, _], [c, _]], _| a.apply_op3(c, a, Sum3)?.matmul(c));
}

#[test]
fn ranks_of_different_speed_gather_alike_after_an_operation_on_two_units() {
    check_pairs(|[[a, b], [c, d]], rank| {
        let mut sum = b.matmul(d)?;
        for round in 0..4 {
            sum = (sum + b.apply_op3(c, a, Sum3)?)?;
            if round % 2 == rank {
                // A unit that has been left can be withheld meanwhile.
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            sum = sum.matmul(a)?.matmul(d)?.matmul(b)?;
        }
        Ok(sum)
    });
}
