//! The offline commands lose nothing, or say what they lose.

#![expect(
    clippy::disallowed_methods,
    reason = "a test writes a map and a configuration by hand"
)]

use std::fs;
use std::path::Path;

use fsdp_formats::internals::encode_value;
use fsdp_layout::{DType, PlainTensor, PlainValue};
use predicates::prelude::*;
use predicates::str::contains;
use tempfile::TempDir;

use crate::common::fsdp;

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../tests/fixtures")
        .join(name)
        .to_str()
        .unwrap()
        .to_owned()
}

/// The path of a new file or directory of the test's own.
fn place(directory: &TempDir, name: &str) -> String {
    directory.path().join(name).to_str().unwrap().to_owned()
}

#[test]
fn a_flag_beats_the_environment() {
    let checkpoint = fixture("fsdp1_orig_adamw_ws2/dcp");
    let mut inspect = fsdp(&["inspect", &checkpoint, "--tree"]);
    inspect
        .env("FSDP_JSON", "true")
        .assert()
        .success()
        .stdout(contains("  model (").and(contains("{").not()));
    fsdp(&["inspect", &checkpoint, "--tree", "--json"])
        .assert()
        .code(2);
    let directory = tempfile::tempdir().unwrap();
    let (plain, hindered) = (
        place(&directory, "plain.safetensors"),
        place(&directory, "hindered.safetensors"),
    );
    fsdp(&["convert", &checkpoint, &plain, "--to", "safetensors"])
        .assert()
        .success();
    let mut convert = fsdp(&["convert", &checkpoint, &hindered, "--to", "safetensors"]);
    for (name, value) in [
        ("INCLUDE", "model.*"),
        ("EXCLUDE", "*"),
        ("DTYPE", "bfloat16"),
        ("PREFIX", "x."),
        ("DRY_RUN", "true"),
    ] {
        convert.env(format!("FSDP_{name}"), value);
    }
    convert.assert().success();
    assert_eq!(fs::read(plain).unwrap(), fs::read(hindered).unwrap());
}

fn foreign(name: &str) -> String {
    let fixtures = Path::new(env!("CARGO_MANIFEST_DIR")).join("../fsdp-tools/tests/fixtures");
    fixtures.join(name).to_str().unwrap().to_owned()
}

#[test]
fn advice_about_values_that_are_nested_too_deep_is_not_about_memory() {
    let advice = contains("hint: save it again").and(contains("memory").not());
    fsdp(&["inspect", &foreign("sound/deep.pt")])
        .assert()
        .code(12)
        .stderr(contains("nesting of 201").and(advice));
}

#[test]
fn classes_and_attributes_of_tensors_are_not_lost_without_a_word() {
    let directory = tempfile::tempdir().unwrap();
    let warned =
        "WARN some tensors have a class or attributes of their own in Python, which are not kept";
    fsdp(&[
        "convert",
        &foreign("attributes.pt"),
        &place(&directory, "x.safetensors"),
        "--to",
        "safetensors",
    ])
    .assert()
    .success()
    .stderr(
        contains(warned)
            .and(contains("tensors=2 first=\"tagged\""))
            .and(contains("\x1b").not()),
    );
    for plain in ["full.pth", "legacy.pt", "per_rank/hsdp", "lightning"].map(foreign) {
        fsdp(&["inspect", &plain])
            .assert()
            .success()
            .stderr(contains("WARN").not());
    }
}

#[test]
fn opaque_values_are_named_shown_and_never_lost_without_a_word() {
    let checkpoint = foreign("obj/dc");
    fsdp(&["verify", &checkpoint])
        .assert()
        .success()
        .stdout(contains("opaque ").and(contains("objs.TrainState")));
    fsdp(&["inspect", &checkpoint])
        .assert()
        .success()
        .stdout(contains("objs.TrainState"));
    let found = fsdp(&["inspect", &checkpoint, "--json"])
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let found: serde_json::Value = serde_json::from_slice(&found).unwrap();
    let name = found["opaque"][0]["name"].as_str().unwrap();
    fsdp(&["cat", &checkpoint, name])
        .assert()
        .success()
        .stdout(contains("\"$type\": \"objs.TrainState\"").and(contains("\n    \"step\": 3")));
    let directory = tempfile::tempdir().unwrap();
    let (file, copy) = (
        place(&directory, "m.safetensors"),
        place(&directory, "copy"),
    );
    let convert = ["convert", &checkpoint, &file, "--to", "safetensors"];
    fsdp(&convert)
        .assert()
        .code(20)
        .stderr(contains("objs.TrainState").and(contains("--drop-opaque")));
    assert!(!Path::new(&file).exists());
    let dropped = [&convert[..], &["--drop-opaque"]].concat();
    let told = contains("1 opaque item was left out")
        .and(contains("objs.TrainState"))
        .and(contains(" and 0 values"));
    fsdp(&dropped).assert().success().stderr(told);
    fsdp(&["reshard", &checkpoint, &copy, "--world-size", "2"])
        .assert()
        .success();
    fsdp(&["diff", &checkpoint, &copy]).assert().success();
}

#[test]
fn opaque_tensors_are_named_shown_and_never_lost_without_a_word() {
    let checkpoint = foreign("opaque_tensors/int8");
    let opaque = contains("opaque      0.weight: torchao.quantization.Int8Tensor, ");
    fsdp(&["inspect", &checkpoint])
        .assert()
        .success()
        .stdout(opaque);
    fsdp(&["verify", &checkpoint, "--level", "deep"])
        .assert()
        .success()
        .stdout(contains("Int8Tensor").and(contains("ok ")));
    fsdp(&["cat", &checkpoint, "0.weight"])
        .assert()
        .success()
        .stdout(contains("Int8Tensor").and(contains("\"dtype\": \"int8\"")));
    fsdp(&["cat", &checkpoint, "0.weight", "--stats"])
        .assert()
        .code(2);
    let directory = tempfile::tempdir().unwrap();
    let (file, copy) = (
        place(&directory, "m.safetensors"),
        place(&directory, "copy"),
    );
    let convert = ["convert", &checkpoint, &file, "--to", "safetensors"];
    fsdp(&convert)
        .assert()
        .code(20)
        .stderr(contains("Int8Tensor").and(contains("--drop-opaque")));
    fsdp(&[&convert[..], &["--drop-opaque"]].concat())
        .assert()
        .success()
        .stderr(contains("2 opaque"));
    fsdp(&["reshard", &checkpoint, &copy, "--world-size", "2"])
        .assert()
        .success();
    fsdp(&["diff", &checkpoint, &copy]).assert().success();
    fsdp(&["verify", &copy, "--level", "deep"])
        .assert()
        .success();
}

#[test]
fn checkpoints_of_other_frameworks_pass_through_every_command() {
    let directory = tempfile::tempdir().unwrap();
    for (number, (name, format, key)) in [
        ("per_rank/verl", "rank-files", "model.up.weight"),
        ("per_rank/tp", "rank-files", "up.weight"),
        (
            "torch_checkpointing/tc",
            "torch-checkpointing",
            "model.0.weight",
        ),
        ("deepspeed/zero3", "deepspeed", "model.embed.weight"),
        (
            "deepspeed/universal",
            "deepspeed-universal",
            "optim.state.norm.weight.exp_avg",
        ),
        ("hfbin", "torch-directory", ""),
        ("numpy_gguf/arrays.npz", "numpy", "fortran"),
        ("numpy_gguf/model.gguf", "gguf", "blk.0.attn_q.weight"),
    ]
    .into_iter()
    .enumerate()
    {
        let source = foreign(name);
        let found = fsdp(&["inspect", &source, "--json"])
            .assert()
            .success()
            .get_output()
            .stdout
            .clone();
        let found: serde_json::Value = serde_json::from_slice(&found).unwrap();
        assert_eq!(found["format"], format, "{name}");
        fsdp(&["verify", &source, "--level", "deep"])
            .assert()
            .success();
        if !key.is_empty() {
            fsdp(&["cat", &source, key, "--stats"]).assert().success();
        }
        let copy = place(&directory, &format!("{number}"));
        if format == "gguf" {
            let reshard = ["reshard", &source, &copy, "--world-size", "3"];
            for dry in [&[][..], &["--dry-run"]] {
                fsdp(&[&reshard[..], dry].concat())
                    .assert()
                    .code(20)
                    .stderr(contains("Q4_K").and(contains("--drop-opaque")));
            }
            fsdp(&[&reshard[..], &["--drop-opaque"]].concat())
                .assert()
                .success()
                .stderr(contains("1 opaque item was left out"));
            continue;
        }
        fsdp(&["reshard", &source, &copy, "--world-size", "3", "--dry-run"])
            .assert()
            .success();
        assert!(!Path::new(&copy).exists());
        fsdp(&["reshard", &source, &copy, "--world-size", "3"])
            .assert()
            .success();
        let tensors = [
            "diff",
            &source,
            &copy,
            "--exclude",
            "*param_groups*",
            "--exclude",
            "optimizer.state.*",
        ];
        fsdp(&tensors).assert().success();
    }
}

#[test]
fn a_map_renames_and_cuts_and_diff_follows_it() {
    let directory = tempfile::tempdir().unwrap();
    let (source, map, to) = (
        foreign("per_rank/accelerate"),
        place(&directory, "map"),
        place(&directory, "to"),
    );
    let rules = "# two halves\nup.weight -> wide.{}.weight";
    fs::write(&map, rules).unwrap();
    fsdp(&["convert", &source, &to, "--to", "hf", "--map", &map])
        .assert()
        .code(2)
        .stderr(contains("line 2"));
    let rules =
        "up.weight -> q.weight, k.weight | permute(heads) | split(0)\ndown.{what} -> out.{what}\n";
    fs::write(&map, rules).unwrap();
    let convert = ["convert", &source, &to, "--to", "hf", "--map", &map];
    fsdp(&convert)
        .assert()
        .code(2)
        .stderr(contains("--set heads=N"));
    let convert = [&convert[..], &["--set", "heads=2"]].concat();
    fsdp(&convert)
        .assert()
        .success()
        .stderr(contains("2 keys matched no rule").and(contains("up.bias")));
    fsdp(&["diff", &source, &to]).assert().code(17);
    let diff = ["diff", &source, &to, "--map", &map, "--set", "heads=2"];
    fsdp(&diff).assert().success().stderr(contains("equal: 6"));
    fsdp(&[&diff[..], &["--include", "q.*"]].concat())
        .assert()
        .success()
        .stderr(contains("equal: 1"));
    // And back.
    let back = place(&directory, "back");
    let reverse = [
        "convert",
        &to,
        &back,
        "--to",
        "dcp",
        "--map",
        &map,
        "--map-reverse",
        "--set",
        "heads=2",
    ];
    fsdp(&reverse).assert().success();
    fsdp(&["diff", &source, &back]).assert().success();
    // A configuration beside the checkpoint tells the number of heads.
    fs::write(
        Path::new(&to).join("config.json"),
        r#"{"num_attention_heads": 2}"#,
    )
    .unwrap();
    let again = place(&directory, "again");
    fsdp(&[
        "convert",
        &to,
        &again,
        "--to",
        "dcp",
        "--map",
        &map,
        "--map-reverse",
    ])
    .assert()
    .success();
    fsdp(&["diff", &back, &again]).assert().success();
    // And so does the one of `--with`, before it.
    let (with, third) = (place(&directory, "with"), place(&directory, "third"));
    fs::create_dir(&with).unwrap();
    fs::write(Path::new(&with).join("config.json"), r#"{"n_head": 2}"#).unwrap();
    fs::write(
        Path::new(&to).join("config.json"),
        r#"{"num_attention_heads": 1}"#,
    )
    .unwrap();
    let convert = [
        "convert", &source, &third, "--to", "hf", "--map", &map, "--with", &with,
    ];
    fsdp(&convert)
        .assert()
        .success()
        .stderr(contains("copied `config.json`"));
    fsdp(&["diff", &source, &third, "--map", &map, "--set", "heads=2"])
        .assert()
        .success();
}

/// Writes a folder of Llama with one layer, of 8 heads and 2 of keys and values, and its
/// configuration.
fn llama(to: &str, more: &[(&str, &[usize])]) {
    let tensors: &[(&str, &[usize])] = &[
        ("model.embed_tokens.weight", &[100, 16]),
        ("model.layers.0.self_attn.q_proj.weight", &[32, 16]),
        ("model.layers.0.self_attn.k_proj.weight", &[8, 16]),
        ("model.layers.0.self_attn.v_proj.weight", &[8, 16]),
        ("model.layers.0.self_attn.o_proj.weight", &[16, 32]),
        ("model.layers.0.input_layernorm.weight", &[16]),
    ];
    let (mut header, mut data) = (serde_json::Map::new(), Vec::new());
    for (name, shape) in tensors.iter().chain(more) {
        let start = data.len();
        data.extend(
            (0..shape.iter().product::<usize>()).flat_map(|at| ((start + at) as f32).to_le_bytes()),
        );
        let info = serde_json::json!({ "dtype": "F32", "shape": shape, "data_offsets": [start, data.len()] });
        header.insert((*name).to_owned(), info);
    }
    let header = serde_json::to_vec(&header).unwrap();
    fs::create_dir(to).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(Path::new(to).join("model.safetensors"), file).unwrap();
    fs::write(
        Path::new(to).join("config.json"),
        r#"{"num_attention_heads": 8, "num_key_value_heads": 2}"#,
    )
    .unwrap();
}

#[test]
fn tensor_parallel_ranks_get_parts_that_read_as_the_whole() {
    let directory = tempfile::tempdir().unwrap();
    let (source, to) = (place(&directory, "source"), place(&directory, "to"));
    llama(&source, &[]);
    let convert = ["convert", &source, &to, "--to", "hf", "--tp", "4"];
    let planned = [&convert[..], &["--dry-run"]].concat();
    let lines = contains("k_proj.weight\t[8, 16]\tcolwise(kv_heads)\t4 x [4, 16]\n")
        .and(contains(
            "embed_tokens.weight\t[100, 16]\tvocab\t3 x [32, 16], 1 x [4, 16]\n",
        ))
        .and(contains("in parts for 4 ranks of at most 3.6 KiB"));
    fsdp(&planned).assert().success().stdout(lines);
    let report = fsdp(&[&planned[..], &["--json"]].concat())
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let report: serde_json::Value = serde_json::from_slice(&report).unwrap();
    assert_eq!(report["tensor_parallel"]["ranks"], 4);
    assert_eq!(
        report["tensor_parallel"]["tensors"][4]["ranks"][3],
        serde_json::json!([16, 8])
    );
    assert!(!Path::new(&to).exists());
    fsdp(&convert)
        .assert()
        .success()
        .stderr(contains("copied `config.json`").and(contains("for 4 ranks")));
    assert!(
        Path::new(&to)
            .join("model-rank-3-part-0.safetensors")
            .exists()
    );
    fsdp(&["diff", &source, &to])
        .assert()
        .success()
        .stderr(contains("equal: 6"));
    fsdp(&["verify", &to, "--level", "deep"]).assert().success();
    // And from these parts to other ones.
    let again = place(&directory, "again");
    fsdp(&[
        "convert",
        &to,
        &again,
        "--to",
        "hf",
        "--tp",
        "2",
        "--map",
        "hf-to-fused",
    ])
    .assert()
    .success();
    let split = [
        "diff",
        &again,
        &source,
        "--map",
        "fused-to-hf",
        "--set",
        "heads=8",
        "--set",
        "kv_heads=2",
    ];
    fsdp(&split).assert().success();
}

#[test]
fn what_cannot_be_cut_for_tensor_parallel_ranks_is_refused_before_anything_is_written() {
    let directory = tempfile::tempdir().unwrap();
    let (source, odd, to) = (
        place(&directory, "source"),
        place(&directory, "odd"),
        place(&directory, "to"),
    );
    llama(&source, &[]);
    llama(&odd, &[("model.layers.0.mixer.in_proj.weight", &[8, 16])]);
    let refused = |options: &[&str], text: &str| {
        for dry in [&[][..], &["--dry-run"]] {
            let arguments = [&["convert"], options, dry].concat();
            fsdp(&arguments).assert().code(2).stderr(contains(text));
        }
        assert!(
            fs::read_dir(directory.path()).unwrap().count() <= 4,
            "nothing is written: {text}"
        );
        assert!(!Path::new(&to).exists());
    };
    let hf =
        |source, more: &[&'static str]| [&[source, to.as_str(), "--to", "hf"][..], more].concat();
    refused(
        &hf(&source, &["--tp", "3"]),
        "embed_tokens.weight` of shape [100, 16] cannot be cut over 3",
    );
    refused(
        &hf(&source, &["--tp", "16"]),
        "8 heads are not a multiple of 16",
    );
    refused(
        &hf(&source, &["--tp", "2", "--set", "kv_heads=4"]),
        "is the number of heads right?",
    );
    refused(
        &hf(&source, &["--tp", "2", "--tp-rule", "mixer=colwise"]),
        "`mixer=colwise` for tensor-parallel ranks matches no",
    );
    refused(
        &hf(&source, &["--tp", "2", "--tp-rule", "q_proj=columns"]),
        "`columns` is not one of",
    );
    refused(
        &hf(&odd, &["--tp", "2"]),
        "no rule says how `model.layers.0.mixer.in_proj.weight` of shape [8, 16]",
    );
    refused(&hf(&odd, &["--tp", "2"]), "--tp-rule");
    refused(
        &hf(&source, &["--set", "heads=8"]),
        "`--set` has no effect without `--map` or `--tp`",
    );
    let diff = ["diff", &source, &source, "--set", "heads=8"];
    fsdp(&diff)
        .assert()
        .code(2)
        .stderr(contains("`--set` has no effect without `--map`\n"));
    refused(
        &[&source, &to, "--to", "dcp", "--tp", "2"],
        "`--tp` has no effect with `--to dcp`",
    );
    fs::remove_file(Path::new(&source).join("config.json")).unwrap();
    refused(&hf(&source, &["--tp", "2"]), "--set NAME=N");
    let rule = ["--tp", "2", "--tp-rule", "mixer.in_proj=rowwise"];
    fsdp(&[&["convert"], &hf(&odd, &[])[..], &rule].concat())
        .assert()
        .success();
    fsdp(&["diff", &odd, &to]).assert().success();
}

#[test]
fn names_that_cannot_be_meant_are_errors_that_tell_the_way_out() {
    let directory = tempfile::tempdir().unwrap();
    let (source, to) = (
        fixture("fsdp2_adamw_ws2/dcp"),
        place(&directory, "to.safetensors"),
    );
    for (options, hint) in [
        (&["--rename", "model="][..], "`model.=` removes `model.`"),
        (&["--rename", "model.=net"], "a dot at the end"),
        (&["--rename", "model=net."], "a dot at the end"),
        (&["--rename", "model=.net"], "a dot at the end"),
        (&["--prefix", "model"], "`--prefix model.`"),
        (&["--prefix", ".model."], "`--prefix model.`"),
        (&["--prefix", "model.."], "`--prefix model.`"),
        (
            &["--rename", "model.=", "--prefix", "x"],
            "`--prefix model.`",
        ),
    ] {
        let convert = ["convert", &source, &to, "--to", "safetensors"];
        fsdp(&[&convert[..], options].concat())
            .assert()
            .code(2)
            .stderr(contains("would make").and(contains(hint)));
        assert!(!Path::new(&to).exists(), "{options:?}");
    }
    let options = [
        "--include",
        "model.*",
        "--rename",
        "model.=",
        "--prefix",
        "a.b_",
    ];
    fsdp(
        &[
            &["convert", &source, &to, "--to", "safetensors"][..],
            &options,
        ]
        .concat(),
    )
    .assert()
    .success();
}

/// Writes a folder of Hugging Face with a weight of 8 bits in blocks, and its configuration.
fn deepseek(to: &str) {
    let header = serde_json::json!({
        "model.layers.0.mlp.up_proj.weight": { "dtype": "F8_E4M3", "shape": [3, 3], "data_offsets": [0, 9] },
        "model.layers.0.mlp.up_proj.weight_scale_inv": { "dtype": "F32", "shape": [2, 2], "data_offsets": [9, 25] },
        "model.norm.weight": { "dtype": "F32", "shape": [2], "data_offsets": [25, 33] },
    });
    let header = serde_json::to_vec(&header).unwrap();
    // The code 0x38 is 1.
    let mut data = vec![0x38; 9];
    for number in [1.0f32, 2.0, 3.0, 4.0, 0.001, 1e30] {
        data.extend(number.to_le_bytes());
    }
    fs::create_dir(to).unwrap();
    let file = [&(header.len() as u64).to_le_bytes()[..], &header, &data].concat();
    fs::write(Path::new(to).join("model.safetensors"), file).unwrap();
    let config = serde_json::json!({
        "torch_dtype": "float32",
        "quantization_config": { "quant_method": "fp8", "weight_block_size": [2, 2] },
    });
    fs::write(Path::new(to).join("config.json"), config.to_string()).unwrap();
}

#[test]
fn a_cast_tells_what_it_left_and_what_became_infinite() {
    let directory = tempfile::tempdir().unwrap();
    let (source, to) = (place(&directory, "source"), place(&directory, "to"));
    deepseek(&source);
    let convert = ["convert", &source, &to, "--to", "hf", "--dtype", "float16"];
    let lines = contains("1 tensor kept the dtype, as hyperparameters, counts or scales")
        .and(contains(
            "1 tensor kept the dtype, which `--dtype` does not cast (`--dequantize`",
        ))
        .and(contains("1 tensor got infinite elements, 1 in all"))
        .and(contains("  model.norm.weight: 1\n"))
        .and(contains("  torch_dtype: float32 -> float16\n"));
    fsdp(&convert).assert().success().stderr(lines);
    let to = place(&directory, "json");
    let convert = [
        "convert", &source, &to, "--to", "hf", "--dtype", "float16", "--json",
    ];
    let output = fsdp(&convert)
        .assert()
        .success()
        .get_output()
        .stdout
        .clone();
    let report: serde_json::Value = serde_json::from_slice(&output).unwrap();
    let names: Vec<_> = report["changes"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| (&change["names"][0], &change["count"]))
        .collect();
    assert_eq!(names.len(), 4, "{names:?}");
    assert!(names.iter().all(|(_, count)| **count == 1), "{names:?}");
}

#[test]
fn dequantized_weights_need_no_scales_and_no_configuration_of_them() {
    let directory = tempfile::tempdir().unwrap();
    let (source, to) = (place(&directory, "source"), place(&directory, "to"));
    deepseek(&source);
    let convert = ["convert", &source, &to, "--to", "hf", "--dequantize"];
    fsdp(&convert).assert().success().stderr(
        contains("1 weight of 8 bits became float32").and(contains("quantization_config: removed")),
    );
    fsdp(&["cat", &to, "model.layers.0.mlp.up_proj.weight", "--json"])
        .assert()
        .success()
        .stdout(contains("[1.0,1.0,2.0,1.0,1.0,2.0,3.0,3.0,4.0]"));
    fsdp(&["verify", &to]).assert().success();
    let config = fs::read_to_string(Path::new(&to).join("config.json")).unwrap();
    assert!(!config.contains("quantization_config"), "{config}");
    // There is nothing left to multiply.
    let again = place(&directory, "again");
    fsdp(&["convert", &to, &again, "--to", "hf", "--dequantize"])
        .assert()
        .code(2)
        .stderr(contains("no weights of 8 bits"));
}

#[test]
fn a_built_in_map_does_not_leave_a_layer_half_named() {
    let directory = tempfile::tempdir().unwrap();
    let (source, to) = (place(&directory, "source"), place(&directory, "to"));
    llama(&source, &[("model.layers.0.self_attn.q_proj.bias", &[32])]);
    let convert = [
        "convert",
        &source,
        &to,
        "--to",
        "dcp",
        "--map",
        "hf-to-llama",
    ];
    fsdp(&convert)
        .assert()
        .code(2)
        .stderr(contains("`model.layers.0.self_attn.q_proj.bias`").and(contains("--exclude")));
    fsdp(&[&convert[..], &["--exclude", "*.bias"]].concat())
        .assert()
        .success();
}

#[test]
fn a_long_log_beside_the_weights_stays_out_of_the_way() {
    let directory = tempfile::tempdir().unwrap();
    let source = place(&directory, "log.pt");
    let entry = |step: i64| {
        PlainValue::Dict(vec![
            ("loss".into(), (step as f64 / 7.0).into()),
            ("step".into(), PlainValue::Int(step)),
        ])
    };
    let weight = PlainValue::Tensor(PlainTensor {
        dtype: DType::U8,
        shape: vec![2],
        data: vec![3, 4],
    });
    let log = PlainValue::List((0..200_000).map(entry).collect());
    let state = PlainValue::Dict(vec![("w".into(), weight), ("log".into(), log)]);
    std::fs::write(&source, encode_value(&state).unwrap()).unwrap();
    fsdp(&["inspect", &source])
        .assert()
        .success()
        .stdout(contains("log"));
    fsdp(&["cat", &source, "w"])
        .assert()
        .success()
        .stdout("3 4\n");
    let to = place(&directory, "to.safetensors");
    let convert = ["convert", &source, &to, "--to", "safetensors"];
    fsdp(&convert).assert().success();
    fsdp(&["diff", &source, &to]).assert().success();
    for selection in [["--exclude", "log"], ["--include", "w"]] {
        let selected = [&convert[..], &selection, &["--overwrite"]].concat();
        fsdp(&selected)
            .assert()
            .success()
            .stderr(contains("1 tensor and 0 values"));
    }
    let reshard = place(&directory, "resharded");
    fsdp(&["reshard", &source, &reshard, "--world-size", "2"])
        .assert()
        .success();
    fsdp(&["diff", &source, &reshard]).assert().success();
}
