//! Collectives of units beside the computation, on GPUs. `cargo xtask gpu` runs this where a GPU
//! is.
//!
//! A test starts this very program again for each rank, where `rank_process` finds out from its
//! environment what to do.

#![expect(clippy::unwrap_used, reason = "these are tests, and their helpers")]
#![expect(
    clippy::disallowed_methods,
    reason = "what ranks tell the test is no checkpoint"
)]

#[path = "../../fsdp-comm/tests/nccl_ranks/mod.rs"]
mod nccl_ranks;
#[path = "../../fsdp-comm/tests/processes/mod.rs"]
mod processes;
#[expect(dead_code, reason = "another test program asks for the rest")]
#[path = "../../fsdp-comm/tests/stand_in/mod.rs"]
mod stand_in;

use std::time::{Duration, Instant};

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use candle_core::{DType, Device, Module, Tensor};
use candle_nn::{Init, Linear, linear};
use fsdp_comm::{BackendKind, ProcessGroup, init_process_group_within};
use fsdp_layout::DeviceMesh;
use fsdp_nn::algorithm::AdamOptions;
use fsdp_nn::{
    Algorithm, BackwardPrefetch, FinishOptions, FsdpConfig, FullyShardedDataParallel,
    MixedPrecision, NnError, Optimizer, Scope, ShardingStrategy, Unit,
};
use fsdp_ops::{layer_norm, linear_add, linear_gelu_erf, packed_attention};
use processes::SHORT_DEADLINE;
use rustix::process::Signal;
use serde::{Deserialize, Serialize};
use stand_in::counts;

const RANKS: usize = 2;
const WIDTH: usize = 8;
const DEADLINE: Duration = Duration::from_secs(60);

type Model = FullyShardedDataParallel<Vec<Unit<Linear>>>;

/// Opens this rank's GPU. Two ranks may share one.
fn open_gpu(rank: usize) -> Device {
    Device::new_cuda(rank % gpus()).unwrap()
}

/// Returns the number of GPUs.
fn gpus() -> usize {
    usize::try_from(CudaContext::device_count().unwrap()).unwrap()
}

/// The program of each rank.
#[test]
fn rank_process() {
    let Ok(task) = std::env::var("FSDP_TEST") else {
        return;
    };
    let group = init_process_group_within(BackendKind::Nccl, DEADLINE).unwrap();
    match task.as_str() {
        "bits" => same_bits(&group),
        "counts" => count(&group),
        "agreements" => agreements(&group),
        "memory" => memory(&group),
        "until a rank is lost in a gather" => until_queued_fails(&group, Lost::InGather),
        "until a rank is lost in a reduction" => until_queued_fails(&group, Lost::InReduction),
        "until a rank of another replica is lost" => until_another_replica_fails(&group),
        other => panic!("`{other}` is not known"),
    }
}

/// Makes a model of units that take equally long.
fn model(group: &ProcessGroup, units: usize, config: FsdpConfig) -> Model {
    wide_model(group, units, WIDTH, config)
}

fn wide_model(group: &ProcessGroup, units: usize, width: usize, config: FsdpConfig) -> Model {
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        (0..units)
            .map(|index| {
                scope
                    .pp(index)
                    .unit(|scope| linear(width, width, scope.vb()))
            })
            .collect()
    })
    .unwrap()
}

/// Returns options with which collectives run beside the computation.
fn ahead(device: &Device) -> FsdpConfig {
    FsdpConfig {
        device: device.clone(),
        forward_prefetch: true,
        backward_prefetch: Some(BackwardPrefetch::Pre),
        ..FsdpConfig::default()
    }
}

fn adamw<M>(model: &FullyShardedDataParallel<M>) -> Optimizer {
    let options = AdamOptions {
        lr: 1e-2,
        ..AdamOptions::adamw()
    };
    Optimizer::new(model.parameters(), Algorithm::AdamW(options)).unwrap()
}

/// Returns four rows to compute a loss of, on the device. Each seed has other values.
fn make_batch(device: &Device, seed: usize) -> Tensor {
    make_input(device, &[4, WIDTH], seed)
}

/// Returns values from -0.4 to 0.6 of this shape, on the device. Each seed has other values.
fn make_input(device: &Device, shape: &[usize], seed: usize) -> Tensor {
    let values: Vec<f32> = (0..shape.iter().product())
        .map(|i| ((i * 7 + seed * 5) % 11) as f32 / 11.0 - 0.4)
        .collect();
    let input = Tensor::from_vec(values, shape, &Device::Cpu).unwrap();
    input.to_device(device).unwrap()
}

/// Runs a forward, and returns the loss, which is still on the GPU.
fn forward(model: &Model, input: &Tensor) -> Result<Tensor, NnError> {
    model.forward(|layers| {
        layers
            .iter()
            .try_fold(input.clone(), |x, layer| {
                layer.forward(&x)?.tanh()?.to_dtype(DType::F32)? + &x
            })?
            .sqr()?
            .mean_all()
    })
}

/// Runs the ranks of a task, slowed down in several ways if this is the stand-in.
#[test]
fn what_overlaps_has_the_bits_of_what_does_not() {
    for slow in [
        &[][..],
        &[("CUDA_STAND_IN_DELAY_US", "300")],
        &[("CUDA_STAND_IN_LINK_US", "4000")],
        &[
            ("CUDA_STAND_IN_DELAY_US", "100"),
            ("CUDA_STAND_IN_LINK_US", "1000"),
        ],
    ] {
        nccl_ranks::start(gpus(), RANKS, "bits", slow).assert_casualties(&[]);
    }
}

/// Returns the losses of some steps, and the bits of this rank's part of each parameter after them.
fn train(group: &ProcessGroup, config: &FsdpConfig, micro_batches: usize) -> (Vec<u32>, Vec<u32>) {
    let model = model(group, 4, config.clone());
    let mut optimizer = adamw(&model);
    let mut losses = Vec::new();
    for step in 0..4 {
        for part in 0..micro_batches {
            let seed = (step * micro_batches + part) * RANKS + group.rank();
            let input = make_batch(&config.device, seed);
            let step = |model: &Model| {
                let loss = forward(model, &input)?;
                model.backward(&loss)?;
                Ok::<_, NnError>(loss)
            };
            let loss = if part + 1 < micro_batches {
                model.no_sync(step).unwrap()
            } else {
                step(&model).unwrap()
            };
            losses.push(loss.to_scalar::<f32>().unwrap().to_bits());
        }
        optimizer.step().unwrap();
        model.parameters().zero_grad();
    }
    (losses, element_bits(&live_parameters(&model)))
}

/// Returns views of this rank's part of each parameter.
fn live_parameters(model: &Model) -> Vec<Tensor> {
    let parameters = model.parameters();
    let pieces = |fqn| parameters.parameter(fqn).unwrap().shards().to_vec();
    let pieces = parameters.fqns().flat_map(pieces);
    pieces.map(|piece| piece.tensor).collect()
}

/// Returns the bits of all elements of some tensors as they are now, to be compared later.
fn element_bits(tensors: &[Tensor]) -> Vec<u32> {
    let values = tensors
        .iter()
        .flat_map(|tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap());
    values.map(f32::to_bits).collect()
}

/// Checks that steps with and without overlap compute the same bits.
fn same_bits(group: &ProcessGroup) {
    let mixed = MixedPrecision {
        param: Some(DType::BF16),
        reduce: Some(DType::F32),
        ..MixedPrecision::default()
    };
    let full = FsdpConfig {
        device: open_gpu(group.rank()),
        ..FsdpConfig::default()
    };
    let cases = [
        (full.clone(), 1),
        (
            FsdpConfig {
                mixed_precision: mixed,
                ..full.clone()
            },
            2,
        ),
        (
            FsdpConfig {
                strategy: ShardingStrategy::NoShard,
                ..full.clone()
            },
            1,
        ),
        (
            FsdpConfig {
                cpu_offload: true,
                ..full
            },
            2,
        ),
    ];
    for (config, micro_batches) in cases {
        let alone = FsdpConfig {
            forward_prefetch: false,
            backward_prefetch: None,
            ..config.clone()
        };
        let expected = train(group, &alone, micro_batches);
        assert!(
            expected
                .0
                .iter()
                .all(|bits| f32::from_bits(*bits).is_finite())
        );
        for backward_prefetch in [BackwardPrefetch::Pre, BackwardPrefetch::Post] {
            for limit_all_gathers in [true, false] {
                let config = FsdpConfig {
                    forward_prefetch: true,
                    backward_prefetch: Some(backward_prefetch),
                    limit_all_gathers,
                    ..config.clone()
                };
                assert!(
                    train(group, &config, micro_batches) == expected,
                    "{config:?}"
                );
            }
        }
    }
}

/// The units of a model of single layers.
const UNITS: usize = 12;

/// The units of the model whose waits are counted. Nothing hides the first gather and the last
/// reduction of a step, so it has many.
const BLOCKS: usize = 24;
/// The width of these units, and the heads of their attention.
const BLOCK_WIDTH: usize = 32;
const HEADS: usize = 2;
/// The microseconds of each piece of work in the stand-in.
const DELAY_US: u64 = 2000;

/// A block of a transformer.
struct Block {
    /// The weight and the bias of each layer.
    norms: [[Tensor; 2]; 2],
    attention: [[Tensor; 2]; 2],
    mlp: [[Tensor; 2]; 2],
}

impl Block {
    fn new(scope: &Scope) -> candle_core::Result<Self> {
        let layer = |name: &str, output: usize, input: usize| {
            let vb = scope.vb().pp(name);
            let stdev = (input as f64).powf(-0.5);
            let weight =
                vb.get_with_hints((output, input), "weight", Init::Randn { mean: 0.0, stdev })?;
            Ok::<_, candle_core::Error>([weight, vb.get(output, "bias")?])
        };
        let norm = |name: &str| {
            let vb = scope.vb().pp(name);
            let weight = vb.get_with_hints(BLOCK_WIDTH, "weight", Init::Const(1.0))?;
            Ok::<_, candle_core::Error>([weight, vb.get(BLOCK_WIDTH, "bias")?])
        };
        Ok(Block {
            norms: [norm("norm_1")?, norm("norm_2")?],
            attention: [
                layer("qkv", 3 * BLOCK_WIDTH, BLOCK_WIDTH)?,
                layer("out", BLOCK_WIDTH, BLOCK_WIDTH)?,
            ],
            mlp: [
                layer("up", 4 * BLOCK_WIDTH, BLOCK_WIDTH)?,
                layer("down", BLOCK_WIDTH, 4 * BLOCK_WIDTH)?,
            ],
        })
    }
}

impl Module for Block {
    fn forward(&self, x: &Tensor) -> candle_core::Result<Tensor> {
        let norm = |x: &Tensor, [weight, bias]: &[Tensor; 2]| layer_norm(x, weight, bias, 1e-5);
        let [[qkv, qkv_bias], [out, out_bias]] = &self.attention;
        let [[up, up_bias], [down, down_bias]] = &self.mlp;
        let qkv = fsdp_ops::linear(&norm(x, &self.norms[0])?, qkv, Some(qkv_bias))?;
        let mixed = packed_attention(&qkv, HEADS, true)?;
        let x = linear_add(&mixed, out, Some(out_bias), x)?;
        let hidden = linear_gelu_erf(&norm(&x, &self.norms[1])?, up, up_bias)?;
        linear_add(&hidden, down, Some(down_bias), &x)
    }
}

type Blocks = FullyShardedDataParallel<Vec<Unit<Block>>>;

fn blocks(group: &ProcessGroup, config: FsdpConfig) -> Blocks {
    FullyShardedDataParallel::new(group.clone(), config, |scope| {
        let units = (0..BLOCKS).map(|index| scope.pp(index).unit(Block::new));
        units.collect()
    })
    .unwrap()
}

/// The steps that are counted, after those that the model learns its order in.
const STEPS: usize = 4;

/// The times and counts of a step of one rank.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct StepCounts {
    forward_seconds: f64,
    /// The time of forward and backward.
    seconds: f64,
    /// The kernels and copies in the computing stream in this time.
    work: u64,
    /// How often the computing stream was told to wait, and how often it had to, in the forward.
    forward_waits: [u64; 2],
    backward_waits: [u64; 2],
    /// How often the host waited for the GPU in the whole step, in which it reads the loss and the
    /// norm of the gradients.
    host_waits: u64,
}

/// The steps of some ranks, with shards and without.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Counted {
    sharded: Vec<StepCounts>,
    alone: Vec<StepCounts>,
}

/// Returns the least of the numbers of several steps.
fn least<N: PartialOrd>(steps: &[StepCounts], number: impl Fn(&StepCounts) -> N) -> N {
    let numbers = steps.iter().map(number);
    numbers
        .reduce(|least, other| if other < least { other } else { least })
        .unwrap()
}

/// The stand-in: communication takes half as long as the computation of a forward, and is hidden
/// behind it. A rank that is ahead of the other has to wait for it, so the rank and the step with
/// the fewest waits count.
#[test]
fn the_computation_waits_for_no_gather_but_the_first_and_the_host_for_numbers_only() {
    if counts().is_none() {
        return;
    }
    let free = run_counted(0);
    let unit_us = least(&free.sharded, |step| step.forward_seconds) * 1e6 / BLOCKS as f64;
    // A collective is a piece of work itself.
    let slow = run_counted((unit_us / 2.0) as u64 - DELAY_US);
    let seconds = |steps: &[StepCounts]| least(steps, |step| step.seconds);
    println!(
        "{unit_us:.0} us for each unit in the forward; a step whose collectives take half of that \
         takes {:.2} times as long as with a link that takes no time, and {:.2} times as long as \
         without shards, with {:.2} times as many kernels and copies in the computing stream; \
         {:?} {:?}",
        seconds(&slow.sharded) / seconds(&free.sharded),
        seconds(&slow.sharded) / seconds(&slow.alone),
        slow.sharded[0].work as f64 / slow.alone[0].work as f64,
        slow.sharded[0],
        slow.alone[0],
    );
    for counted in [&free, &slow] {
        let steps = &counted.sharded;
        for step in steps {
            assert_eq!(step.forward_waits[0], BLOCKS as u64, "{counted:?}");
            assert_eq!(step.backward_waits[0], 2 * BLOCKS as u64, "{counted:?}");
            assert!(step.host_waits <= 3, "{counted:?}");
            // The parameters of a unit are filled by one launch, twice.
            let more = step.work - counted.alone[0].work;
            assert!(more <= 2 * BLOCKS as u64, "{counted:?}");
        }
        assert!(
            least(steps, |step| step.forward_waits[1]) <= 1,
            "{counted:?}"
        );
        // In the backward the stream waits for the first gather and the last reduction.
        assert!(
            least(steps, |step| step.backward_waits[1]) <= 2,
            "{counted:?}"
        );
    }
}

/// Runs some steps with a link that takes so many microseconds for each collective, and returns the
/// counts of all ranks.
fn run_counted(link_us: u64) -> Counted {
    let out = tempfile::tempdir().unwrap();
    let variables = [
        ("CUDA_STAND_IN_DELAY_US", &*DELAY_US.to_string()),
        ("CUDA_STAND_IN_LINK_US", &*link_us.to_string()),
        ("FSDP_TEST_LOG", out.path().to_str().unwrap()),
    ];
    let mut ranks = nccl_ranks::start(gpus(), RANKS, "counts", &variables);
    ranks.wait_for(&(0..RANKS).collect::<Vec<_>>(), DEADLINE);
    let mut counted = Counted::default();
    for rank in 0..RANKS {
        let text = std::fs::read(out.path().join(rank.to_string())).unwrap();
        let of_rank: Counted = serde_json::from_slice(&text).unwrap();
        counted.sharded.extend(of_rank.sharded);
        counted.alone.extend(of_rank.alone);
    }
    counted
}

/// Runs the steps of [`run_counted`].
fn count(group: &ProcessGroup) {
    let device = open_gpu(group.rank());
    let config = ahead(&device);
    let alone = blocks(
        group,
        FsdpConfig {
            strategy: ShardingStrategy::NoShard,
            ..config.clone()
        },
    );
    alone.set_requires_gradient_sync(false);
    let sharded = blocks(group, config);
    let mut optimizer = adamw(&sharded);
    let x = make_input(&device, &[1, 16, BLOCK_WIDTH], group.rank());
    let mut step = || counted_step(&sharded, Some(&mut optimizer), &x);
    // The order of the units is known from the third step on.
    step();
    step();
    let counted = Counted {
        sharded: (0..STEPS).map(|_| step()).collect(),
        alone: (0..2).map(|_| counted_step(&alone, None, &x)).collect(),
    };
    let out = std::env::var("FSDP_TEST_LOG").unwrap();
    std::fs::write(
        format!("{out}/{}", group.rank()),
        serde_json::to_vec(&counted).unwrap(),
    )
    .unwrap();
}

/// Runs a step, and counts what its parts do. Its time is that of forward and backward.
fn counted_step(model: &Blocks, optimizer: Option<&mut Optimizer>, input: &Tensor) -> StepCounts {
    // Let the GPU finish earlier steps first, so that their work is not counted.
    input.device().synchronize().unwrap();
    model.group().barrier().unwrap();
    let waits = || {
        let counts = counts().unwrap();
        (counts.own_stream_waits, counts.process.host_waits)
    };
    let work = || counts().unwrap().thread.work();
    let since = |later: [u64; 2], earlier: [u64; 2]| [0, 1].map(|k| later[k] - earlier[k]);
    let work_before = work();
    let (stream_before, host_before) = waits();
    let begun = Instant::now();
    let loss = model.forward(|blocks| {
        let folded = blocks
            .iter()
            .try_fold(input.clone(), |x, block| block.forward(&x));
        folded?.sqr()?.mean_all()
    });
    let loss = loss.unwrap();
    // The counts of the forward are complete once the GPU has done it.
    loss.device().synchronize().unwrap();
    let forward_seconds = begun.elapsed().as_secs_f64();
    let (stream_between, _) = waits();
    model.backward(&loss).unwrap();
    let work = work() - work_before;
    loss.to_scalar::<f32>().unwrap();
    let seconds = begun.elapsed().as_secs_f64();
    let (stream_after, _) = waits();
    if let Some(optimizer) = optimizer {
        model.parameters().clip_grad_norm(1.0).unwrap();
        optimizer.step().unwrap();
    }
    let (_, host_after) = waits();
    model.parameters().zero_grad();
    StepCounts {
        forward_seconds,
        seconds,
        work,
        forward_waits: since(stream_between, stream_before),
        backward_waits: since(stream_after, stream_between),
        // One wait, in the middle, is that of this test.
        host_waits: host_after - host_before - 1,
    }
}

#[test]
fn steps_of_a_known_order_agree_twice_with_clipping_and_once_without() {
    nccl_ranks::start(gpus(), RANKS, "agreements", &[]).assert_casualties(&[]);
}

/// A way to train, which makes the same calls in each step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Way {
    /// Gradients are clipped and the optimizer steps in one call, which returns the loss.
    Finishes,
    /// The gradients are never looked at.
    NeverClips,
    /// The first of two backwards leaves its gradients to the second one.
    Accumulates,
}

/// The number of a step in which something else is done than in others.
const OTHER_STEP: usize = 4;

/// Something that is done in one step only.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Other {
    Nothing,
    /// A forward before the step, for an evaluation.
    Evaluates,
    /// A unit is not used.
    UsesFewerUnits,
}

/// Checks how often steps agree with the other ranks, and how often the host waits for the GPU.
fn agreements(group: &ProcessGroup) {
    let device = open_gpu(group.rank());
    let alone = FsdpConfig {
        device: device.clone(),
        ..FsdpConfig::default()
    };
    let replicated = FsdpConfig {
        strategy: ShardingStrategy::NoShard,
        ..ahead(&device)
    };
    for way in [Way::Finishes, Way::NeverClips, Way::Accumulates] {
        let expected = if way == Way::Finishes { 2 } else { 1 };
        let mut outcomes = Vec::new();
        for config in [&alone, &ahead(&device), &replicated] {
            for other in [Other::Nothing, Other::Evaluates, Other::UsesFewerUnits] {
                let (asked, bits) = agreements_and_waits(group, config, way, other);
                for (step, [agreed, waited]) in asked.iter().enumerate().skip(2) {
                    let what = format!("step {step} of {asked:?}: {way:?}, {other:?}, {config:?}");
                    assert!(*waited <= 3 && *agreed >= expected, "{what}");
                    // A step that leaves the order agrees on its calls, and so does the next one,
                    // which leaves it again. In that after them units are gathered ahead again.
                    let is_near = (OTHER_STEP..OTHER_STEP + 3).contains(&step);
                    assert!(
                        *agreed == expected || is_near && other != Other::Nothing,
                        "{what}"
                    );
                }
                let is_agreed_on = asked[OTHER_STEP][0] > expected;
                let has_gathers = config.strategy == ShardingStrategy::FullShard;
                assert!(!has_gathers || is_agreed_on == (other != Other::Nothing));
                outcomes.push(bits);
            }
        }
        // Neither the evaluation nor the order of the collectives changes a bit.
        let [plain, evaluated, fewer, ..] = &outcomes[..] else {
            panic!("{} outcomes", outcomes.len());
        };
        assert!(plain == evaluated && plain != fewer, "{way:?}");
        assert!(outcomes[..3] == outcomes[3..6], "{way:?}");
    }
}

/// Trains for some steps. Returns the agreements of each and the waits of the host in it, and the
/// bits of the parameters after them.
fn agreements_and_waits(
    group: &ProcessGroup,
    config: &FsdpConfig,
    way: Way,
    other: Other,
) -> (Vec<[u64; 2]>, Vec<u32>) {
    let model = model(group, UNITS, config.clone());
    let mut optimizers = [adamw(&model)];
    let x = make_batch(&config.device, group.rank());
    let waits = || counts().map_or(0, |counts| counts.process.host_waits);
    let mut asked = Vec::new();
    for step in 0..OTHER_STEP + 4 {
        let other = if step == OTHER_STEP {
            other
        } else {
            Other::Nothing
        };
        let (traffic, waited) = (group.traffic(), waits());
        optimizers[0].groups_mut()[0]
            .algorithm
            .set_lr(1e-2 / (step + 1) as f64)
            .unwrap();
        if other == Other::Evaluates {
            forward(&model, &x).unwrap();
        }
        train_step(&model, &mut optimizers, &x, way, other);
        asked.push([group.traffic().since(&traffic).agreements, waits() - waited]);
    }
    (asked, element_bits(&live_parameters(&model)))
}

/// Runs one step.
fn train_step(model: &Model, optimizers: &mut [Optimizer], x: &Tensor, way: Way, other: Other) {
    let backward = |model: &Model| {
        let loss = model.forward(|layers| {
            let used = if other == Other::UsesFewerUnits {
                &layers[1..]
            } else {
                &layers[..]
            };
            used.iter()
                .try_fold(x.clone(), |x, layer| layer.forward(&x)?.tanh()? + &x)?
                .sqr()?
                .mean_all()
        })?;
        model.backward(&loss)?;
        Ok::<_, NnError>(loss)
    };
    if way == Way::Accumulates {
        model.no_sync(backward).unwrap();
    }
    let loss = backward(model).unwrap();
    if way == Way::Finishes {
        let options = FinishOptions {
            max_norm: 1.0,
            losses: &[loss],
            ..FinishOptions::default()
        };
        let parameters = model.parameters();
        parameters.finish_step(optimizers, None, &options).unwrap();
    } else {
        optimizers[0].step().unwrap();
        model.parameters().zero_grad();
    }
}

/// The stand-in, whose streams and links are slow. So the host is far ahead of the GPU, and only
/// events keep units from being gathered early.
#[test]
fn units_are_gathered_no_earlier_than_allowed() {
    if counts().is_none() {
        return;
    }
    let slow = [
        ("CUDA_STAND_IN_DELAY_US", "300"),
        ("CUDA_STAND_IN_LINK_US", "3000"),
    ];
    let mut ranks = nccl_ranks::start(gpus(), RANKS, "memory", &slow);
    for (_, output) in ranks.wait_for(&[0, 1], DEADLINE) {
        print!("{output}");
    }
}

/// Checks how much GPU memory steps take with and without a limit of what is gathered ahead.
fn memory(group: &ProcessGroup) {
    const WIDE: usize = 128;
    let device = open_gpu(group.rank());
    let x = Tensor::ones((1, WIDE), DType::F32, &device).unwrap();
    let most_bytes = |config: FsdpConfig| {
        let model = wide_model(group, UNITS, WIDE, config);
        let step = || {
            device.synchronize().unwrap();
            group.barrier().unwrap();
            // Each call begins to count `most_bytes` anew.
            counts();
            let loss = forward(&model, &x).unwrap();
            model.backward(&loss).unwrap();
            device.synchronize().unwrap();
            model.parameters().zero_grad();
            counts().unwrap().most_bytes
        };
        // The order of the units is known from the third step on.
        step();
        step();
        step()
    };
    let alone = FsdpConfig {
        device: device.clone(),
        ..FsdpConfig::default()
    };
    let plain = most_bytes(alone);
    let limited = most_bytes(ahead(&device));
    let unlimited = most_bytes(FsdpConfig {
        limit_all_gathers: false,
        ..ahead(&device)
    });
    // The unit that is gathered ahead, and at most the gradients of the one that is reduced
    // meanwhile.
    let unit = (WIDE * WIDE * 4) as u64;
    assert!(limited <= plain + 2 * unit, "{limited} after {plain}");
    assert!(unlimited > limited, "{unlimited} after {limited}");
}

/// The collective in which a rank is lost.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Lost {
    InGather,
    InReduction,
}

/// Starts so many ranks, and sends a signal to the last one when all have queued a unit's
/// collectives, which the link of the stand-in holds up. The others' errors name it.
fn lose_the_last_rank(world_size: usize, task: &str, signal: Signal) {
    if counts().is_none() {
        return;
    }
    let logs = tempfile::tempdir().unwrap();
    let variables = [
        ("CUDA_STAND_IN_LINK_US", "400000"),
        ("FSDP_TEST_LOG", logs.path().to_str().unwrap()),
    ];
    let mut ranks = nccl_ranks::start(gpus(), world_size, task, &variables);
    ranks.wait_until(|| std::fs::read_dir(logs.path()).unwrap().count() == world_size);
    ranks.signal(world_size - 1, signal);
    let survivors: Vec<usize> = (0..world_size - 1).collect();
    ranks.wait_for(&survivors, SHORT_DEADLINE + Duration::from_secs(7));
}

#[test]
fn the_others_name_a_rank_that_dies_while_a_unit_is_gathered() {
    lose_the_last_rank(RANKS, "until a rank is lost in a gather", Signal::KILL);
}

#[test]
fn the_others_name_a_rank_that_stops_while_a_unit_is_gathered() {
    lose_the_last_rank(RANKS, "until a rank is lost in a gather", Signal::STOP);
}

#[test]
fn the_others_name_a_rank_that_dies_while_gradients_are_reduced() {
    lose_the_last_rank(RANKS, "until a rank is lost in a reduction", Signal::KILL);
}

#[test]
fn the_others_name_a_rank_that_stops_while_gradients_are_reduced() {
    lose_the_last_rank(RANKS, "until a rank is lost in a reduction", Signal::STOP);
}

#[test]
fn a_replica_that_lost_a_rank_sends_nothing_of_it_to_the_others() {
    lose_the_last_rank(4, "until a rank of another replica is lost", Signal::STOP);
}

/// Queues the reductions of a unit, the first of which the last rank does not survive. The ranks of
/// the other replica are well, but the sums that they wait for are undefined.
fn until_another_replica_fails(group: &ProcessGroup) {
    let rank = group.rank();
    let device = open_gpu(rank);
    let config = FsdpConfig {
        strategy: ShardingStrategy::HybridShard,
        mesh: Some(DeviceMesh::new(&[2, 2], &["replicate", "shard"], 4).unwrap()),
        ..ahead(&device)
    };
    // Rank 0 has no collective with the lost one: it gets the error of those that have.
    let deadline = if rank == 0 { DEADLINE } else { SHORT_DEADLINE };
    let model = model(&group.with_deadline(deadline), 1, config);
    let x = make_batch(&device, rank);
    let live = live_parameters(&model);
    let before = element_bits(&live);
    let loss = forward(&model, &x).unwrap();
    loss.to_scalar::<f32>().unwrap();
    model.backward(&loss).unwrap();
    let log = std::env::var("FSDP_TEST_LOG").unwrap();
    std::fs::write(format!("{log}/{rank}"), "queued").unwrap();
    let error = model.parameters().synchronize().unwrap_err();
    assert!(error.to_string().contains("rank 3 "), "{error}");
    assert!(element_bits(&live) == before);
}

/// Queues collectives of units, which the last rank does not survive, and expects errors that name
/// it from whatever the program does next. The parameters stay as they are.
fn until_queued_fails(group: &ProcessGroup, lost: Lost) {
    let device = open_gpu(group.rank());
    let config = FsdpConfig {
        strategy: match lost {
            Lost::InGather => ShardingStrategy::FullShard,
            // Without gathers in the backward.
            Lost::InReduction => ShardingStrategy::ShardGradOp,
        },
        ..ahead(&device)
    };
    let model = model(&group.with_deadline(SHORT_DEADLINE), 2, config);
    let mut optimizers = [adamw(&model)];
    let x = make_batch(&device, group.rank());
    for _ in 0..2 {
        train_step(&model, &mut optimizers, &x, Way::Finishes, Other::Nothing);
    }
    let live = live_parameters(&model);
    let before = element_bits(&live);
    let loss = forward(&model, &x).unwrap();
    if lost == Lost::InReduction {
        loss.to_scalar::<f32>().unwrap();
        model.backward(&loss).unwrap();
    }
    let log = std::env::var("FSDP_TEST_LOG").unwrap();
    std::fs::write(format!("{log}/{}", group.rank()), "queued").unwrap();
    let error = match lost {
        // The backward may have queued everything before the loss is noticed.
        Lost::InGather => {
            let queued = model.backward(&loss).map(drop);
            queued
                .and_then(|()| model.parameters().synchronize())
                .unwrap_err()
        }
        Lost::InReduction => {
            let parameters = model.parameters();
            let finished = parameters.finish_step(&mut optimizers, None, &FinishOptions::default());
            finished.unwrap_err()
        }
    };
    let last = format!("rank {} ", RANKS - 1);
    // The unit's gathers may have been done just before the rank was lost. Later ones never are.
    let later = forward(&model, &x).and_then(|loss| {
        loss.to_scalar::<f32>()?;
        model.parameters().synchronize()
    });
    for error in [error, later.unwrap_err()] {
        assert!(error.to_string().contains(&last), "{error}");
    }
    assert!(element_bits(&live) == before);
}
