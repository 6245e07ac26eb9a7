//! The examples, run as their readers run them.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::process::Command;

use candle_core::{DType, Device, Tensor};
use candle_nn::VarBuilder;
use candle_transformers::models::llama::{Cache, Llama, LlamaConfig};
use tempfile::TempDir;

#[path = "../../tests/tests/object_store/server.rs"]
#[expect(dead_code, reason = "other tests use more of it")]
mod server;

/// Returns the command of an example.
macro_rules! example {
    ($name:literal) => {
        Command::new(env!(concat!("CARGO_BIN_EXE_", $name)))
    };
}

/// The variable that names a Python with torch, for the test of both directions.
const PYTHON_VARIABLE: &str = "FSDP_INTEROP_PYTHON";

/// Runs a command that must succeed, and returns what it wrote to stdout.
fn run(command: &mut Command) -> String {
    let output = command.output().unwrap();
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert!(
        output.status.success(),
        "{command:?}: {}\n{stderr}",
        output.status
    );
    String::from_utf8(output.stdout).unwrap()
}

/// Returns the last loss in the output of an example.
fn last_loss(output: &str) -> f64 {
    let after = output.rsplit("loss ").next().unwrap();
    let end = after
        .find(|c: char| !c.is_ascii_digit() && c != '.')
        .unwrap_or(after.len());
    after[..end]
        .parse()
        .unwrap_or_else(|_| panic!("no loss in:\n{output}"))
}

fn assert_near(a: f64, b: f64) {
    assert!((a - b).abs() <= 1e-4 * (1.0 + a.abs()), "{a} and {b}");
}

#[test]
fn a_run_goes_on_at_another_number_of_ranks_as_if_it_had_not_stopped() {
    let dir = TempDir::new().unwrap();
    let train = |out: &str, ranks: &str, steps: &str| {
        run(example!("train")
            .args(["--ranks", ranks, "--steps", steps, "--out"])
            .arg(dir.path().join(out)))
    };
    let in_one_go = train("one", "1", "40");
    let first = train("two", "3", "20");
    let second = train("two", "2", "40");
    assert!(
        second.starts_with("resumed from step 20 on 2 ranks"),
        "{second}"
    );
    assert_near(last_loss(&in_one_go), last_loss(&second));
    assert!(last_loss(&second) < last_loss(&first));
}

#[test]
fn a_model_of_ones_own_learns_the_same_on_any_number_of_ranks() {
    let train = |options: &[&str]| run(example!("custom-model").args(options));
    let alone = train(&["--ranks", "1"]);
    let sharded = train(&["--ranks", "3"]);
    assert!(
        (last_loss(&alone) - last_loss(&sharded)).abs() < 1e-2,
        "{alone}{sharded}"
    );
    let first = last_loss(sharded.lines().next().unwrap());
    assert!(last_loss(&sharded) < 0.7 * first, "{sharded}");
    // Half precision ends near it.
    assert!((last_loss(&train(&["--bf16"])) - last_loss(&sharded)).abs() < 0.2);
}

#[test]
fn processes_meet_and_go_on() {
    let dir = TempDir::new().unwrap();
    for (ranks, step) in [(2, 10), (1, 20)] {
        let port = std::net::TcpListener::bind(("127.0.0.1", 0))
            .unwrap()
            .local_addr()
            .unwrap()
            .port();
        let start = |rank: usize| {
            example!("processes")
                .arg(dir.path())
                .envs([
                    ("RANK", rank.to_string()),
                    ("WORLD_SIZE", ranks.to_string()),
                ])
                .envs([
                    ("MASTER_ADDR", "127.0.0.1".to_owned()),
                    ("MASTER_PORT", port.to_string()),
                ])
                .env("FSDP_JOB_ID", format!("example-{step}"))
                .spawn()
                .unwrap()
        };
        let started: Vec<_> = (0..ranks).map(start).collect();
        for mut rank in started {
            assert!(rank.wait().unwrap().success());
        }
        assert!(
            dir.path()
                .join(format!("step-{step:08}/.metadata"))
                .is_file()
        );
    }
}

#[test]
fn an_object_store_holds_a_run() {
    let server = server::Server::start();
    let train = || {
        run(example!("object-store")
            .arg("s3://bucket/runs/example")
            .envs(server.environment()))
    };
    assert_eq!(train(), "went on from step 0\nstep 5 of 5: ok\n");
    assert_eq!(train(), "went on from step 5\nstep 10 of 10: ok\n");
}

#[test]
fn both_halves_of_the_pair_go_on_from_each_other() {
    let dir = TempDir::new().unwrap();
    let place = |name: &str| dir.path().join(name);
    let ours = |load: Option<&str>, save: &str, ranks: &str| {
        let mut command = example!("pytorch");
        if let Some(load) = load {
            command.arg("--load").arg(place(load));
        }
        run(command
            .arg("--save")
            .arg(place(save))
            .args(["--ranks", ranks])
            .current_dir(dir.path()))
    };
    ours(None, "10", "3");
    ours(Some("10"), "20", "2");
    let straight = ours(Some("20"), "30", "1");
    let Some(python) = std::env::var_os(PYTHON_VARIABLE) else {
        return;
    };
    let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("pytorch.py");
    run(Command::new(python)
        .arg(script)
        .arg("--load")
        .arg(place("10"))
        .arg("--save")
        .arg(place("torch-20")));
    assert_near(
        last_loss(&ours(Some("torch-20"), "there-and-back", "4")),
        last_loss(&straight),
    );
}

#[test]
fn a_checkpoint_of_pytorch_is_read_and_converted_without_a_model() {
    let dir = TempDir::new().unwrap();
    let checkpoint =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../tests/fixtures/fsdp2_adamw_ws2/dcp");
    let output = dir.path().join("model.safetensors");
    let told = run(example!("checkpoint-tools").arg(checkpoint).arg(&output));
    assert!(
        told.starts_with("DCP directory\n") && told.contains(" tensors to `"),
        "{told}"
    );
    let tensors = candle_core::safetensors::load(&output, &Device::Cpu).unwrap();
    assert!(!tensors.is_empty() && tensors.keys().all(|name| !name.starts_with("model.")));
}

/// Writes a small Llama.
fn tiny_llama(dir: &TempDir) -> PathBuf {
    let model = dir.path().join("llama");
    run(example!("tiny-llama").arg(&model));
    model
}

#[test]
fn a_sharded_llama_says_what_the_whole_one_says_and_keeps_its_part_of_the_weights() {
    let dir = TempDir::new().unwrap();
    let model = tiny_llama(&dir);
    let expected = continued(&model, &[1, 2, 3], 8);
    let expected: Vec<String> = expected.iter().map(ToString::to_string).collect();
    for ranks in ["1", "2", "4"] {
        let told = run(example!("llama")
            .arg("--model")
            .arg(&model)
            .args(["--ranks", ranks]));
        assert_eq!(
            told.lines().last(),
            Some(expected.join(",").as_str()),
            "{ranks} ranks"
        );
        let numbers: Vec<u64> = told
            .lines()
            .next()
            .unwrap()
            .split(|c: char| !c.is_ascii_digit())
            .filter_map(|number| number.parse().ok())
            .collect();
        let [whole, kept, peak] = numbers[..] else {
            panic!("{told}")
        };
        if ranks == "4" {
            assert!(kept == whole / 4 && peak == whole + kept, "{told}");
        }
    }
}

/// Continues tokens with the Llama of candle-transformers, whole, in this process.
fn continued(model: &Path, prompt: &[u32], count: usize) -> Vec<u32> {
    let config: LlamaConfig =
        serde_json::from_slice(&std::fs::read(model.join("config.json")).unwrap()).unwrap();
    let config = config.into_config(false);
    let tensors =
        candle_core::safetensors::load(model.join("model.safetensors"), &Device::Cpu).unwrap();
    let llama = Llama::load(
        VarBuilder::from_tensors(tensors, DType::F32, &Device::Cpu),
        &config,
    )
    .unwrap();
    let mut cache = Cache::new(false, DType::F32, &config, &Device::Cpu).unwrap();
    let mut tokens = prompt.to_vec();
    for _ in 0..count {
        let input = Tensor::new(tokens.as_slice(), &Device::Cpu)
            .unwrap()
            .unsqueeze(0)
            .unwrap();
        let scores = llama.forward(&input, 0, &mut cache).unwrap();
        tokens.push(
            scores
                .squeeze(0)
                .unwrap()
                .argmax(0)
                .unwrap()
                .to_scalar()
                .unwrap(),
        );
    }
    tokens
}

#[test]
fn adapters_learn_the_same_on_any_number_of_ranks_and_nothing_else_changes() {
    let dir = TempDir::new().unwrap();
    let model = tiny_llama(&dir);
    let train = |out: &str, options: &[&str]| {
        run(example!("lora")
            .arg("--model")
            .arg(&model)
            .arg("--out")
            .arg(dir.path().join(out))
            .args(options))
    };
    let alone = train("alone", &["--ranks", "1", "--check"]);
    assert!(
        alone.starts_with("largest difference to candle-transformers"),
        "{alone}"
    );
    let first = train("sharded", &["--ranks", "3", "--steps", "10"]);
    let second = train("sharded", &["--ranks", "2"]);
    assert_near(last_loss(&alone), last_loss(&second));
    assert!(last_loss(&second) < last_loss(&first));

    let adapters: HashMap<String, Tensor> = candle_core::safetensors::load(
        dir.path().join("sharded/adapter/adapter_model.safetensors"),
        &Device::Cpu,
    )
    .unwrap();
    assert_eq!(adapters.len(), 8 * 2 * 2);
    for (name, tensor) in &adapters {
        assert!(
            name.starts_with("base_model.model.model.layers.") && name.contains(".lora_"),
            "{name}"
        );
        let moved = tensor
            .abs()
            .unwrap()
            .sum_all()
            .unwrap()
            .to_scalar::<f32>()
            .unwrap();
        assert!(moved > 0.0, "{name} was not trained");
    }
    // The frozen weights of the last checkpoint are those of the model.
    let base =
        candle_core::safetensors::load(model.join("model.safetensors"), &Device::Cpu).unwrap();
    let saved = dir.path().join("model-20.safetensors");
    run(example!("checkpoint-tools")
        .arg(dir.path().join("sharded/step-00000020"))
        .arg(&saved));
    let saved = candle_core::safetensors::load(&saved, &Device::Cpu).unwrap();
    for (name, weight) in &base {
        let bits = |tensor: &Tensor| tensor.flatten_all().unwrap().to_vec1::<f32>().unwrap();
        assert_eq!(bits(weight), bits(&saved[name]), "{name}");
    }
}
