//! `fsdp train` on GPUs: the losses of CPUs, and checkpoints that cross. `cargo xtask gpu` runs
//! this where a GPU is.

#![expect(clippy::unwrap_used, reason = "a test fails by panicking")]

mod common;
mod metrics;
mod steps;

use std::path::Path;

use candle_core::cuda_backend::cudarc::driver::CudaContext;
use common::{fsdp, program};
use metrics::losses;
use serde::Deserialize;
use tempfile::TempDir;

const SMALL: [&str; 12] = [
    "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "24", "--sample",
    "8",
];

/// A model for which the stand-in for a GPU needs little time.
const TINY: [&str; 12] = [
    "--layers", "1", "--heads", "2", "--hidden", "16", "--seq", "8", "--batch", "6", "--sample",
    "0",
];

/// GPUs add in another order, and their exponentials round differently.
const RELATIVE: f64 = 1e-3;

fn train(out: &Path, arguments: &[&str]) {
    fsdp(&["train", "--out", out.to_str().unwrap()])
        .args(arguments)
        .assert()
        .success();
}

fn launch(nproc: usize, out: &Path, arguments: &[&str]) {
    launch_with(&["--nproc", &nproc.to_string()], out, arguments);
}

/// Trains with these options of the launcher.
fn launch_with(options: &[&str], out: &Path, arguments: &[&str]) {
    let program = program();
    let train = [
        program.to_str().unwrap(),
        "train",
        "--timeout",
        "60",
        "--out",
        out.to_str().unwrap(),
    ];
    fsdp(&["launch"])
        .args(options)
        .arg("--")
        .args(train)
        .args(arguments)
        .assert()
        .success();
}

#[track_caller]
fn assert_close(found: &[f64], expected: &[f64]) {
    assert_close_within(found, expected, RELATIVE);
}

#[track_caller]
fn assert_close_within(found: &[f64], expected: &[f64], relative: f64) {
    assert_eq!(found.len(), expected.len());
    for (step, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert!(
            (found - expected).abs() / expected < relative,
            "step {step}: {found} is not {expected}"
        );
    }
}

fn gpus() -> usize {
    usize::try_from(CudaContext::device_count().unwrap()).unwrap()
}

/// A power of two divides the batch.
fn ranks_of_nccl() -> usize {
    1 << gpus().min(8).ilog2()
}

#[test]
fn one_gpu_has_the_losses_of_a_cpu_with_every_optimizer() {
    let dir = TempDir::new().unwrap();
    for optimizer in [
        "adamw",
        "adam",
        "sgd",
        "adagrad",
        "adafactor",
        "muon",
        "schedule-free",
    ] {
        let (cpu, gpu) = (
            dir.path().join(format!("{optimizer}-cpu")),
            dir.path().join(format!("{optimizer}-gpu")),
        );
        let arguments = [
            &SMALL[..],
            &[
                "--steps",
                "6",
                "--optimizer",
                optimizer,
                "--clip-grad-norm",
                "0.5",
            ],
        ]
        .concat();
        train(&cpu, &arguments);
        train(&gpu, &[&arguments[..], &["--device", "cuda"]].concat());
        assert_close(&losses(&gpu), &losses(&cpu));
    }
}

/// Only the stand-in can be a GPU that is older than the kernels. Real ones take no notice.
#[test]
fn a_gpu_without_kernels_has_the_losses_of_a_cpu() {
    let dir = TempDir::new().unwrap();
    for optimizer in ["adamw", "adafactor", "muon"] {
        let arguments = [&TINY[..], &["--steps", "3", "--optimizer", optimizer]].concat();
        let [cpu, gpu] = ["cpu", "gpu"].map(|name| dir.path().join(format!("{optimizer}-{name}")));
        train(&cpu, &arguments);
        fsdp(&ONE_RANK)
            .args(["--out", gpu.to_str().unwrap()])
            .args(&arguments)
            .env("CUDA_STAND_IN_CAPABILITY", "75")
            .assert()
            .success();
        assert_close(&losses(&gpu), &losses(&cpu));
    }
}

/// The variable that makes this program a rank of [`steps`].
const RANK: &str = "FSDP_TEST_RANK";

/// The program of each rank of [`steps`]. It sees one GPU, which it may share with other ranks.
#[test]
fn rank_process() {
    if std::env::var_os(RANK).is_some() {
        steps::run_rank();
    }
}

#[test]
fn steps_over_nccl_have_the_losses_of_a_cpu_with_every_optimizer_and_strategy() {
    let this_program = std::env::current_exe().unwrap();
    for ranks in [1usize, 2, 4] {
        let ranks_per_gpu = ranks.div_ceil(gpus()).to_string();
        fsdp(&["launch", "--nproc", &ranks.to_string()])
            .args(["--ranks-per-gpu", &ranks_per_gpu, "--"])
            .arg(&this_program)
            .args(["rank_process", "--exact", "--nocapture"])
            .env(RANK, "1")
            .assert()
            .success();
    }
}

/// Returns `true` for each step of a run that was skipped.
fn skipped(out: &Path) -> Vec<bool> {
    let metrics = std::fs::read_to_string(out.join("metrics.jsonl")).unwrap();
    let lines = metrics
        .lines()
        .map(|line| serde_json::from_str::<serde_json::Value>(line).unwrap());
    lines.map(|line| line["skipped"] == true).collect()
}

#[test]
fn steps_of_every_kind_have_the_losses_of_a_cpu_on_one_rank_and_two() {
    let dir = TempDir::new().unwrap();
    let bf16 = ["--mixed-precision", "bf16"];
    let cases: [(&str, &[&str], f64); 7] = [
        (
            "tf32",
            &["--allow-tf32", "--clip-grad-norm", "0.5"],
            RELATIVE,
        ),
        (
            "accumulation",
            &["--accumulate", "3", "--clip-grad-norm", "0.5"],
            RELATIVE,
        ),
        ("checkpointing", &["--activation-checkpointing"], RELATIVE),
        (
            "offload",
            &["--cpu-offload", "--clip-grad-norm", "0.5"],
            RELATIVE,
        ),
        ("flat", &["--flat", "--clip-grad-norm", "0.5"], RELATIVE),
        ("bf16", &[&bf16[..], &["--accumulate", "2"]].concat(), 1e-2),
        (
            "bf16-offload",
            &[&bf16[..], &["--cpu-offload"]].concat(),
            1e-2,
        ),
    ];
    for (case, arguments, relative) in cases {
        let arguments = [&TINY[..], &["--steps", "4"], arguments].concat();
        let cpu = dir.path().join(format!("{case}-cpu"));
        train(&cpu, &arguments);
        for ranks in ["1", "2"] {
            let gpu = dir.path().join(format!("{case}-{ranks}"));
            let on_gpu = ["--device", "cuda", "--nproc", ranks];
            train(&gpu, &[&arguments[..], &on_gpu].concat());
            assert_close_within(&losses(&gpu), &losses(&cpu), relative);
        }
    }
}

/// With one token the loss scale is too large for the first step.
#[test]
fn a_step_that_a_loss_scale_skips_on_a_cpu_is_skipped_on_a_gpu() {
    let dir = TempDir::new().unwrap();
    let (cpu, gpu) = (dir.path().join("cpu"), dir.path().join("gpu"));
    let arguments = [
        "--layers",
        "1",
        "--heads",
        "2",
        "--hidden",
        "16",
        "--seq",
        "1",
        "--batch",
        "1",
        "--sample",
        "0",
        "--steps",
        "6",
        "--mixed-precision",
        "f16",
        "--clip-grad-norm",
        "0.5",
    ];
    train(&cpu, &arguments);
    train(&gpu, &[&arguments[..], &["--device", "cuda"]].concat());
    assert_eq!(skipped(&cpu), [true, false, false, false, false, false]);
    assert_eq!(skipped(&gpu), skipped(&cpu));
    assert_close_within(&losses(&gpu), &losses(&cpu), 1e-2);
}

/// After the first step the weights are so large that no gradient is finite.
#[test]
fn gradients_that_are_not_finite_end_a_run_or_change_nothing() {
    let dir = TempDir::new().unwrap();
    let arguments = [
        &SMALL[..],
        &[
            "--device",
            "cuda",
            "--steps",
            "4",
            "--save-every",
            "1",
            "--lr",
            "1e38",
        ],
    ]
    .concat();
    for ranks in ["1", "2"] {
        let out = dir.path().join(format!("skip-{ranks}"));
        let skip = ["--nonfinite", "skip", "--keep-last", "9", "--nproc", ranks];
        train(&out, &[&arguments[..], &skip].concat());
        assert_eq!(skipped(&out), [false, true, true, true]);
        let step = |number: u32| out.join(format!("step-0000000{number}"));
        for part in ["model.*", "optim.*"] {
            fsdp(&["diff", step(1).to_str().unwrap(), step(4).to_str().unwrap()])
                .args(["--full", "--include", part])
                .assert()
                .success();
        }
        let out = dir.path().join(format!("error-{ranks}"));
        fsdp(&["train", "--out", out.to_str().unwrap(), "--nproc", ranks])
            .args(&arguments)
            .assert()
            .failure()
            .stderr(predicates::str::contains("step 2 was not done"));
        assert_eq!(skipped(&out), [false]);
    }
}

/// Several ranks share a GPU where there are not enough: as threads and as processes, through the
/// host.
#[test]
fn ranks_that_share_a_gpu_have_the_losses_of_cpus_and_checkpoints_cross() {
    let dir = TempDir::new().unwrap();
    let path = |name: &str| dir.path().join(name);
    let six = [&SMALL[..], &["--steps", "6", "--save-every", "3"]].concat();
    train(&path("cpu"), &[&six[..], &["--nproc", "2"]].concat());
    for strategy in ["full-shard", "shard-grad-op", "no-shard"] {
        let out = path(strategy);
        train(
            &out,
            &[
                &six[..],
                &["--nproc", "2", "--device", "cuda", "--strategy", strategy],
            ]
            .concat(),
        );
        assert_close(&losses(&out), &losses(&path("cpu")));
    }
    let gpu = path("processes");
    launch(
        2,
        &gpu,
        &[
            &six[..],
            &["--backend", "tcp", "--device", "cuda", "--async-save"],
        ]
        .concat(),
    );
    assert_close(&losses(&gpu), &losses(&path("cpu")));
    for out in ["processes", "full-shard"] {
        fsdp(&["verify", path(out).join("step-00000006").to_str().unwrap()])
            .assert()
            .success();
    }
    // To CPUs at another number of ranks; and from CPUs.
    train(&gpu, &["--nproc", "3", "--steps", "9", "--resume"]);
    train(
        &path("cpu"),
        &[
            "--nproc", "1", "--steps", "9", "--resume", "--device", "cuda",
        ],
    );
    assert_close(&losses(&gpu), &losses(&path("cpu")));
}

/// One rank a GPU.
#[test]
fn ranks_over_nccl_have_the_losses_of_cpus_and_checkpoints_cross() {
    let dir = TempDir::new().unwrap();
    let (cpu, gpu) = (dir.path().join("cpu"), dir.path().join("gpu"));
    let ranks = ranks_of_nccl();
    train(&cpu, &[&SMALL[..], &["--steps", "6"]].concat());
    launch(
        ranks,
        &gpu,
        &[&SMALL[..], &["--steps", "6", "--backend", "nccl"]].concat(),
    );
    assert_close(&losses(&gpu), &losses(&cpu));
    let ahead = dir.path().join("ahead");
    let prefetch = ["--backward-prefetch", "pre", "--forward-prefetch"];
    launch(
        ranks,
        &ahead,
        &[
            &SMALL[..],
            &["--steps", "6", "--backend", "nccl"],
            &prefetch,
        ]
        .concat(),
    );
    assert_close(&losses(&ahead), &losses(&cpu));
    train(&gpu, &["--nproc", "2", "--steps", "9", "--resume"]);
    launch(
        ranks,
        &cpu,
        &["--steps", "9", "--resume", "--backend", "nccl"],
    );
    assert_close(&losses(&gpu), &losses(&cpu));
}

#[test]
fn two_ranks_on_each_gpu_over_nccl_have_the_losses_of_cpus() {
    let dir = TempDir::new().unwrap();
    let (cpu, gpu) = (dir.path().join("cpu"), dir.path().join("gpu"));
    let ranks = (2 * ranks_of_nccl()).to_string();
    train(&cpu, &[&SMALL[..], &["--steps", "6"]].concat());
    launch_with(
        &["--nproc", &ranks, "--ranks-per-gpu", "2"],
        &gpu,
        &[&SMALL[..], &["--steps", "6", "--backend", "nccl"]].concat(),
    );
    assert_close(&losses(&gpu), &losses(&cpu));
}

/// Half types are rounded after each operation, in places that differ between devices.
#[test]
fn ranks_over_nccl_have_the_losses_of_cpus_in_bf16() {
    let dir = TempDir::new().unwrap();
    let (cpu, gpu) = (dir.path().join("cpu"), dir.path().join("gpu"));
    let ranks = ranks_of_nccl();
    let arguments = [&SMALL[..], &["--steps", "6", "--mixed-precision", "bf16"]].concat();
    train(
        &cpu,
        &[&arguments[..], &["--nproc", &ranks.to_string()]].concat(),
    );
    launch(
        ranks,
        &gpu,
        &[&arguments[..], &["--backend", "nccl"]].concat(),
    );
    assert_close_within(&losses(&gpu), &losses(&cpu), 1e-2);
}

/// A step with the learning rate 0 changes no weight, so what it saves is what was loaded.
#[test]
fn weights_of_gpus_go_to_three_cpus_and_back_bit_for_bit() {
    let dir = TempDir::new().unwrap();
    let out = dir.path().join("run");
    let ranks = ranks_of_nccl();
    launch(
        ranks,
        &out,
        &[&SMALL[..], &["--steps", "3", "--backend", "nccl"]].concat(),
    );
    train(
        &out,
        &["--nproc", "3", "--steps", "4", "--resume", "--lr", "0"],
    );
    launch(
        ranks,
        &out,
        &["--steps", "5", "--resume", "--backend", "nccl"],
    );
    let step = |number: u32| {
        out.join(format!("step-0000000{number}"))
            .to_str()
            .unwrap()
            .to_owned()
    };
    for later in [4, 5] {
        fsdp(&[
            "diff",
            &step(3),
            &step(later),
            "--full",
            "--include",
            "model.*",
        ])
        .assert()
        .success();
    }
    // The command compares something.
    fsdp(&["diff", &step(3), &step(5), "--full"])
        .assert()
        .code(17);
}

/// The demands of one step on a GPU, counted by the stand-in.
#[derive(Debug, Default, PartialEq, Eq, Deserialize)]
struct Counts {
    kernels: u64,
    memsets: u64,
    allocations: u64,
    events: u64,
    copies_up: u64,
    copies_down: u64,
    host_waits: u64,
    bytes_allocated: u64,
    tf32_products: u64,
    ptx_modules: u64,
}

impl Counts {
    /// Returns all counts, changed together with those of another one.
    fn with(&self, other: &Counts, change: fn(u64, u64) -> u64) -> Counts {
        Counts {
            kernels: change(self.kernels, other.kernels),
            memsets: change(self.memsets, other.memsets),
            allocations: change(self.allocations, other.allocations),
            events: change(self.events, other.events),
            copies_up: change(self.copies_up, other.copies_up),
            copies_down: change(self.copies_down, other.copies_down),
            host_waits: change(self.host_waits, other.host_waits),
            bytes_allocated: change(self.bytes_allocated, other.bytes_allocated),
            tf32_products: change(self.tf32_products, other.tf32_products),
            ptx_modules: change(self.ptx_modules, other.ptx_modules),
        }
    }

    fn plus(self, other: Counts) -> Counts {
        self.with(&other, |first, second| first + second)
    }

    fn minus(&self, other: &Counts) -> Counts {
        self.with(other, |first, second| first - second)
    }

    /// Returns `true` if no count is larger than that of `most`.
    fn is_at_most(&self, most: &Counts) -> bool {
        self.kernels <= most.kernels
            && self.memsets <= most.memsets
            && self.allocations <= most.allocations
            && self.events <= most.events
            && self.copies_up <= most.copies_up
            && self.copies_down <= most.copies_down
            && self.host_waits <= most.host_waits
            && self.bytes_allocated <= most.bytes_allocated
    }
}

/// Returns what a run of so many steps asks of its GPUs, of all ranks together, with these first
/// arguments of `fsdp`; `None` on a real one, which does not count.
fn counts_of_run(steps: u64, command: &[&str], arguments: &[&str]) -> Option<Counts> {
    std::env::var_os("CUDA_STAND_IN_DEVICES")?;
    let dir = TempDir::new().unwrap();
    let file = dir.path().join("counts");
    let out = dir.path().join("run");
    fsdp(command)
        .args(["--out", out.to_str().unwrap()])
        .args(["--steps", &steps.to_string(), "--sample", "0"])
        .args(arguments)
        .env("CUDA_STAND_IN_COUNTS", &file)
        .assert()
        .success();
    let text = std::fs::read_to_string(file).unwrap();
    let ranks = text.lines().map(|line| serde_json::from_str(line).unwrap());
    Some(ranks.fold(Counts::default(), Counts::plus))
}

/// Returns what the third step of a run asks of its GPUs. Both runs end with a save.
fn counts_of_step(command: &[&str], arguments: &[&str]) -> Option<Counts> {
    let two = counts_of_run(2, command, arguments)?;
    let three = counts_of_run(3, command, arguments)?;
    Some(three.minus(&two))
}

const ONE_RANK: [&str; 3] = ["train", "--device", "cuda"];

const TWELVE_BLOCKS: [&str; 10] = [
    "--layers", "12", "--heads", "2", "--hidden", "16", "--seq", "16", "--batch", "2",
];

/// The time of a step is partly that of the calls of the host.
#[test]
fn a_step_asks_little_of_the_gpu() {
    let bf16 = [
        &TWELVE_BLOCKS[..],
        &["--mixed-precision", "bf16", "--clip-grad-norm", "0.5"],
    ]
    .concat();
    let Some(counts) = counts_of_step(&ONE_RANK, &bf16) else {
        return;
    };
    let most = Counts {
        kernels: 543,
        memsets: 6,
        allocations: 564,
        events: 0,
        copies_up: 2,
        copies_down: 1,
        host_waits: 1,
        bytes_allocated: 1_000_000,
        ..Counts::default()
    };
    assert!(counts.is_at_most(&most), "{counts:?} is more than {most:?}");
    let arguments = [&bf16[..], &["--activation-checkpointing"]].concat();
    let recomputed = counts_of_step(&ONE_RANK, &arguments).unwrap();
    // The forward of each block once more, and copies of its input and its output.
    let most = Counts {
        kernels: 711,
        memsets: 18,
        allocations: 780,
        bytes_allocated: 1_300_000,
        ..most
    };
    assert!(
        recomputed.is_at_most(&most),
        "{recomputed:?} is more than {most:?}"
    );
}

/// No tensor of a step has an element for each pair of positions.
#[test]
fn the_memory_of_a_step_grows_with_the_length_of_its_sequences_and_no_faster() {
    let bytes_of_step = |seq: usize| {
        let seq = seq.to_string();
        let mut arguments = vec!["--layers", "2", "--heads", "4", "--hidden", "16"];
        arguments.extend(["--batch", "1", "--mixed-precision", "bf16", "--seq", &seq]);
        Some(counts_of_step(&ONE_RANK, &arguments)?.bytes_allocated)
    };
    let lengths = [64, 128, 256, 512];
    let Some(bytes) = lengths
        .map(bytes_of_step)
        .into_iter()
        .collect::<Option<Vec<u64>>>()
    else {
        return;
    };
    // Each doubling of the length adds twice the memory that the one before has added.
    let grown: Vec<u64> = bytes.windows(2).map(|pair| pair[1] - pair[0]).collect();
    for pair in grown.windows(2) {
        let ratio = pair[1] as f64 / pair[0] as f64;
        assert!((1.9..2.1).contains(&ratio), "{bytes:?} for {lengths:?}");
    }
}

/// The most memory that is allocated at once, in bytes, beside that of PyTorch's FSDP2 on an H200
/// (`torch.cuda.max_memory_allocated`), for the same model and batch. It is counted without
/// carrying out any kernel.
#[test]
fn a_large_model_needs_little_more_memory_than_with_pytorch() {
    const GIB: f64 = (1 << 30) as f64;
    if std::env::var_os("CUDA_STAND_IN_DEVICES").is_none() {
        return;
    }
    let model = [
        "--layers", "12", "--heads", "12", "--hidden", "768", "--seq", "1024", "--batch", "8",
    ];
    for (options, of_pytorch) in [(&["--mixed-precision", "bf16"][..], 3.4), (&[], 5.7)] {
        let dir = TempDir::new().unwrap();
        let file = dir.path().join("counts");
        fsdp(&ONE_RANK)
            .args(["--out", dir.path().join("run").to_str().unwrap()])
            .args(["--steps", "2", "--sample", "0"])
            .args(model)
            .args(options)
            .env("CUDA_STAND_IN_COMPUTES", "0")
            .env("CUDA_STAND_IN_MEMORY", (64_u64 << 30).to_string())
            .env("CUDA_STAND_IN_COUNTS", &file)
            .assert()
            .success();
        let counts: serde_json::Value =
            serde_json::from_str(&std::fs::read_to_string(file).unwrap()).unwrap();
        let gib = counts["most_bytes"].as_u64().unwrap() as f64 / GIB;
        println!("{options:?}: {gib:.2} GiB, PyTorch {of_pytorch}");
        assert!(gib <= 1.15 * of_pytorch, "{options:?}: {gib:.2} GiB");
    }
}

/// Two ranks over NCCL: the host of each waits once in a step, for the losses and its part of the
/// norm, which come down together. Nothing else goes through the host, however many parameters and
/// units there are.
#[test]
fn a_step_over_nccl_waits_once_whatever_the_model_and_the_optimizer() {
    let program = program();
    let command = [
        "launch",
        "--nproc",
        "2",
        "--",
        program.to_str().unwrap(),
        "train",
        "--backend",
        "nccl",
    ];
    for optimizer in ["adamw", "adafactor", "muon"] {
        let of_layers = |layers| {
            let model = ["--layers", layers, "--optimizer", optimizer];
            counts_of_step(&command, &[&TINY[2..], &model].concat())
        };
        let (Some(small), Some(large)) = (of_layers("1"), of_layers("4")) else {
            return;
        };
        println!("{optimizer}: {small:?} with 1 block, {large:?} with 4");
        assert_eq!([small.host_waits, large.host_waits], [2, 2], "{optimizer}");
        assert_eq!(
            [small.copies_down, large.copies_down],
            [2, 2],
            "{optimizer}"
        );
        // candle copies the shapes of tensors that Muon transposes or adds up to the GPU.
        if optimizer != "muon" {
            assert_eq!(small.copies_up, large.copies_up, "{optimizer}");
        }
    }
}

#[test]
fn products_use_tf32_only_if_that_is_allowed() {
    for (options, uses_tf32) in [
        (&[][..], false),
        (&["--allow-tf32"], true),
        (&["--allow-tf32", "--mixed-precision", "bf16"], false),
    ] {
        let arguments = [&TINY[..], options].concat();
        let Some(counts) = counts_of_run(1, &ONE_RANK, &arguments) else {
            return;
        };
        assert_eq!(counts.tf32_products > 0, uses_tf32, "{arguments:?}");
    }
}

/// The first step on a machine compiles the modules of candle's kernels that a run needs, which
/// come as PTX. The kernels of this project come compiled.
#[test]
fn few_modules_have_to_be_compiled_for_the_first_step() {
    let Some(one) = counts_of_run(1, &ONE_RANK, &TINY) else {
        return;
    };
    let three = counts_of_run(3, &ONE_RANK, &TINY).unwrap();
    assert_eq!(one.ptx_modules, three.ptx_modules);
    assert!(one.ptx_modules <= 5, "{one:?}");
}

/// The stand-in for a GPU can be given too little memory for the model.
#[test]
fn memory_that_runs_out_is_an_error_of_the_run() {
    if std::env::var_os("CUDA_STAND_IN_DEVICES").is_none() {
        return;
    }
    let dir = TempDir::new().unwrap();
    for (case, arguments) in [["--nproc", "2"], ["--nproc", "1"]].iter().enumerate() {
        let out = dir.path().join(case.to_string());
        let mut run = fsdp(&[
            "train",
            "--steps",
            "2",
            "--device",
            "cuda",
            "--timeout",
            "20",
            "--out",
            out.to_str().unwrap(),
        ]);
        run.args(SMALL)
            .args(arguments)
            .env("CUDA_STAND_IN_MEMORY", "262144");
        run.assert()
            .failure()
            .stderr(predicates::str::contains("OUT_OF_MEMORY"));
        assert!(!out.join("step-00000002").exists());
    }
}
