//! Averages of checkpoints, and LoRA adapters that go into their base.

use std::path::Path;

use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::internals::encode_value;
use fsdp_formats::{FileError, FormatError};
use fsdp_layout::with_causes;
use fsdp_layout::{DType, ErrorKind, Failure, PlainTensor, PlainValue, TensorBox};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, convert};
use fsdp_tools::merge::{Average, Lora, LoraConfig};
use fsdp_tools::verify::{Level, VerifyOptions, verify};
use half::bf16;

use crate::changes::told;
use crate::foreign::opened;

pub(crate) fn tensor(shape: &[usize], numbers: &[f32]) -> PlainValue {
    let data = numbers
        .iter()
        .flat_map(|number| number.to_le_bytes())
        .collect();
    PlainValue::Tensor(PlainTensor {
        dtype: DType::F32,
        shape: shape.to_vec(),
        data,
    })
}

fn bf16s(numbers: &[f32]) -> PlainValue {
    let data = numbers
        .iter()
        .flat_map(|&number| bf16::from_f32(number).to_le_bytes())
        .collect();
    PlainValue::Tensor(PlainTensor {
        dtype: DType::BF16,
        shape: vec![numbers.len()],
        data,
    })
}

/// Writes a file of torch with these keys, and opens it.
pub(crate) fn file(path: &Path, items: Vec<(&str, PlainValue)>) -> Box<dyn Checkpoint> {
    let items = items
        .into_iter()
        .map(|(key, value)| (key.into(), value))
        .collect();
    std::fs::write(path, encode_value(&PlainValue::Dict(items)).unwrap()).unwrap();
    opened(path)
}

fn read(checkpoint: &dyn Checkpoint, fqn: &str) -> Vec<u8> {
    let tensor = checkpoint.metadata().tensor(fqn).unwrap();
    let bounds = TensorBox::whole(&tensor.shape);
    let mut bytes = vec![0; bounds.numel() * tensor.properties.dtype.size_in_bytes() as usize];
    checkpoint.read_box(fqn, &bounds, &mut bytes).unwrap();
    bytes
}

pub(crate) fn floats(checkpoint: &dyn Checkpoint, fqn: &str) -> Vec<f32> {
    read(checkpoint, fqn)
        .as_chunks()
        .0
        .iter()
        .map(|bytes| f32::from_le_bytes(*bytes))
        .collect()
}

#[test]
fn an_average_is_rounded_once_and_leaves_counts_and_optimizers() {
    let parent = tempfile::tempdir().unwrap();
    let make = |name: &str, w: [f32; 2], h: f32, step: i64| {
        let optimizer = PlainValue::Dict(vec![("exp_avg".into(), tensor(&[1], &[w[0]]))]);
        file(
            &parent.path().join(name),
            vec![
                ("w", tensor(&[2, 1], &w)),
                ("half", bf16s(&[h, 1.0])),
                ("optimizer", optimizer),
                ("step", PlainValue::Int(step)),
            ],
        )
    };
    let (a, b) = (
        make("a.pt", [1.0, -3.0], 1.0, 10),
        make("b.pt", [2.0, 5.0], 1.0078125, 20),
    );
    let average = Average::new(vec![&*a, &*b], &[]).unwrap();
    assert_eq!(
        told(&average.changes(), "came from the first"),
        ["optimizer.exp_avg", "step"]
    );
    assert_eq!(floats(&average, "w"), [1.5, 1.0]);
    assert_eq!(floats(&average, "optimizer.exp_avg"), [1.0]);
    assert_eq!(average.read_value("step").unwrap(), PlainValue::Int(10));
    // Half way between two numbers of bf16: to the even one.
    assert_eq!(
        read(&average, "half"),
        [bf16::from_f32(1.0), bf16::from_f32(1.0)]
            .map(bf16::to_le_bytes)
            .concat()
    );
    let weighted = Average::new(vec![&*a, &*b], &[3.0, 1.0]).unwrap();
    assert_eq!(floats(&weighted, "w"), [1.25, -1.0]);
    // The same through a conversion, from checkpoints cut in other ways.
    let (cut, to) = (parent.path().join("cut"), parent.path().join("to"));
    convert(
        &*b,
        &cut,
        OutputFormat::Dcp { ranks: 2 },
        ConvertOptions::default(),
    )
    .unwrap();
    let cut = opened(&cut);
    let average = Average::new(vec![&*a, &*cut], &[3.0, 1.0]).unwrap();
    convert(
        &average,
        &to,
        OutputFormat::Dcp { ranks: 3 },
        ConvertOptions::default(),
    )
    .unwrap();
    let written = opened(&to);
    assert_eq!(floats(&*written, "w"), [1.25, -1.0]);
    assert!(
        verify(&*written, Level::Deep, VerifyOptions::default())
            .unwrap()
            .is_ok()
    );
}

#[test]
fn checkpoints_that_do_not_belong_together_have_no_average() {
    let parent = tempfile::tempdir().unwrap();
    let make = |name: &str, items| file(&parent.path().join(name), items);
    let a = make("a.pt", vec![("w", tensor(&[2], &[1.0, 2.0]))]);
    for (name, items, what) in [
        (
            "keys",
            vec![("v", tensor(&[2], &[1.0, 2.0]))],
            "is not in both",
        ),
        (
            "more",
            vec![("w", tensor(&[2], &[1.0, 2.0])), ("v", PlainValue::None)],
            "is not in both",
        ),
        ("shape", vec![("w", tensor(&[1], &[1.0]))], "shape"),
        ("dtype", vec![("w", bf16s(&[1.0, 2.0]))], "dtype"),
        ("kind", vec![("w", PlainValue::None)], "is a tensor in one"),
    ] {
        let b = make(&format!("{name}.pt"), items);
        let error = Average::new(vec![&*a, &*b], &[]).unwrap_err();
        assert!(error.to_string().contains(what), "{name}: {error}");
        // Neither of the two is damaged.
        assert_eq!(error.kind(), ErrorKind::Difference, "{name}");
    }
    assert!(Average::new(vec![&*a, &*a], &[1.0]).is_err());
    assert!(Average::new(vec![&*a, &*a], &[1.0, -1.0]).is_err());
    assert!(Average::new(vec![&*a, &*a], &[f64::NAN, 1.0]).is_err());
    assert!(Average::new(Vec::new(), &[]).is_err());
}

/// Writes an adapter as PEFT does, and opens it.
pub(crate) fn adapter(
    path: &Path,
    config: &str,
    items: Vec<(&str, PlainValue)>,
) -> Box<dyn Checkpoint> {
    std::fs::create_dir(path).unwrap();
    std::fs::write(path.join("adapter_config.json"), config).unwrap();
    let source = file(&path.with_extension("pt"), items);
    let to = path.join("adapter_model.safetensors");
    convert(
        &*source,
        &to,
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    )
    .unwrap();
    open(path, Default::default()).unwrap()
}

const A: &str = "base_model.model.up.lora_A.weight";
const B: &str = "base_model.model.up.lora_B.weight";

#[test]
fn an_adapter_is_added_to_its_base() {
    let parent = tempfile::tempdir().unwrap();
    let weight = [1.0, 2.0, 3.0, 4.0, 5.0, 6.0];
    let base = vec![
        ("up.weight", tensor(&[3, 2], &weight)),
        ("up.bias", tensor(&[3], &[0.0; 3])),
    ];
    let base = file(&parent.path().join("base.pt"), base);
    // B·A = [[10, 20], [1, 2], [30, 40]] with a rank of 2.
    let factors = || {
        vec![
            (A, tensor(&[2, 2], &[10.0, 20.0, 30.0, 40.0])),
            (B, tensor(&[3, 2], &[1.0, 0.0, 0.1, 0.0, 0.0, 1.0])),
        ]
    };
    for (name, config, scale) in [
        (
            "plain",
            r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4}"#,
            2.0f32,
        ),
        (
            "rslora",
            r#"{"peft_type": "LORA", "r": 2, "lora_alpha": 4, "use_rslora": true}"#,
            4.0 / 2f32.sqrt(),
        ),
        (
            "pattern",
            r#"{"peft_type": "LORA", "lora_alpha": 4, "alpha_pattern": {"up": 1}}"#,
            0.5,
        ),
    ] {
        let path = parent.path().join(name);
        let adapter = adapter(&path, config, factors());
        let merged = Lora::new(&*base, &*adapter, &LoraConfig::read(path).unwrap()).unwrap();
        assert_eq!(merged.changed().collect::<Vec<_>>(), ["up.weight"]);
        let found = floats(&merged, "up.weight");
        for ((found, weight), update) in found
            .iter()
            .zip(weight)
            .zip([10.0, 20.0, 1.0, 2.0, 30.0, 40.0])
        {
            assert!(
                (found - (weight + scale * update)).abs() < 1e-4,
                "{name}: {found}"
            );
        }
        // Any box is the same as in the whole, and so is what is written.
        let mut part = [0; 8];
        merged
            .read_box(
                "up.weight",
                &TensorBox::new(vec![1, 1], vec![2, 1]),
                &mut part,
            )
            .unwrap();
        assert_eq!(
            part.as_chunks()
                .0
                .iter()
                .map(|b| f32::from_le_bytes(*b))
                .collect::<Vec<_>>(),
            [found[3], found[5]]
        );
        let to = parent.path().join(format!("{name}-merged"));
        convert(
            &merged,
            &to,
            OutputFormat::SafetensorsDirectory {
                max_file_bytes: 1 << 20,
            },
            ConvertOptions::default(),
        )
        .unwrap();
        assert_eq!(floats(&*opened(&to), "up.weight"), found);
    }
    // The settings name a layer of which the adapter has no factors.
    let path = parent.path().join("incomplete");
    let incomplete = adapter(
        &path,
        r#"{"peft_type": "LORA", "lora_alpha": 2, "target_modules": ["up", "down"]}"#,
        factors(),
    );
    let base = vec![
        ("up.weight", tensor(&[3, 2], &weight)),
        ("down.weight", tensor(&[3, 2], &weight)),
        ("head.weight", tensor(&[3, 2], &weight)),
    ];
    let base = file(&parent.path().join("base-of-two.pt"), base);
    let config = LoraConfig::read(path.as_path()).unwrap();
    let merged = Lora::new(&*base, &*incomplete, &config).unwrap();
    assert_eq!(told(&merged.changes(), "got no update"), ["down.weight"]);
    std::fs::write(
        path.join("adapter_config.json"),
        r#"{"peft_type": "LORA", "lora_alpha": 2, "modules_to_save": ["head"]}"#,
    )
    .unwrap();
    let config = LoraConfig::read(path).unwrap();
    let error = with_causes(&Lora::new(&*base, &*incomplete, &config).unwrap_err());
    assert!(error.contains("save the module `head` whole"), "{error}");
    // The weight the other way round.
    let base = file(
        &parent.path().join("conv1d.pt"),
        vec![("up.weight", tensor(&[2, 3], &[0.0; 6]))],
    );
    let path = parent.path().join("fan");
    let adapter = adapter(
        &path,
        r#"{"peft_type": "LORA", "lora_alpha": 2, "fan_in_fan_out": true}"#,
        factors(),
    );
    let merged = Lora::new(&*base, &*adapter, &LoraConfig::read(path).unwrap()).unwrap();
    assert_eq!(
        floats(&merged, "up.weight"),
        [10.0, 1.0, 30.0, 20.0, 2.0, 40.0]
    );
}

#[test]
fn a_weight_that_the_adapter_has_too_replaces_the_base_before_its_update() {
    let parent = tempfile::tempdir().unwrap();
    let base = vec![
        ("words.weight", tensor(&[3, 2], &[9.0; 6])),
        ("up.weight", tensor(&[1, 1], &[9.0])),
    ];
    let base = file(&parent.path().join("base.pt"), base);
    let items = vec![
        (
            "base_model.model.words.base_layer.weight",
            tensor(&[3, 2], &[1.0, 2.0, 3.0, 4.0, 5.0, 6.0]),
        ),
        (
            "base_model.model.words.lora_embedding_A",
            tensor(&[1, 3], &[1.0, 10.0, 100.0]),
        ),
        (
            "base_model.model.words.lora_embedding_B",
            tensor(&[2, 1], &[1.0, 2.0]),
        ),
        (
            "base_model.model.up.base_layer.weight",
            tensor(&[1, 1], &[7.0]),
        ),
    ];
    let path = parent.path().join("adapter");
    let adapter = adapter(&path, r#"{"peft_type": "LORA", "lora_alpha": 1}"#, items);
    let merged = Lora::new(&*base, &*adapter, &LoraConfig::read(path).unwrap()).unwrap();
    assert_eq!(
        merged.changed().collect::<Vec<_>>(),
        ["words.weight", "up.weight"]
    );
    assert_eq!(
        floats(&merged, "words.weight"),
        [2.0, 4.0, 13.0, 24.0, 105.0, 206.0]
    );
    assert_eq!(floats(&merged, "up.weight"), [7.0]);
}

#[test]
fn adapters_whose_update_is_another_one_are_refused_by_their_setting() {
    let parent = tempfile::tempdir().unwrap();
    for (name, setting, is_refused) in [
        ("pissa", r#""init_lora_weights": "pissa""#, true),
        ("niter", r#""init_lora_weights": "pissa_niter_4""#, true),
        ("olora", r#""init_lora_weights": "olora""#, true),
        ("gaussian", r#""init_lora_weights": "gaussian""#, false),
        ("plain", r#""init_lora_weights": true"#, false),
        ("alora", r#""alora_invocation_tokens": [1, 2]"#, true),
        ("no-alora", r#""alora_invocation_tokens": null"#, false),
        ("bdlora", r#""use_bdlora": true"#, true),
        ("no-bdlora", r#""use_bdlora": false"#, false),
        (
            "replication",
            r#""layer_replication": [[0, 4], [2, 5]]"#,
            true,
        ),
    ] {
        let path = parent.path().join(name);
        adapter(
            &path,
            &format!(r#"{{"peft_type": "LORA", "lora_alpha": 4, {setting}}}"#),
            vec![],
        );
        let read = LoraConfig::read(path).map_err(|error| with_causes(&error));
        let word = setting.split('"').nth(1).unwrap();
        assert_eq!(
            read.as_ref().err().map(|error| error.contains(word)),
            is_refused.then_some(true),
            "{name}: {read:?}"
        );
    }
}

/// PEFT notes only of the last layer that it has adapted if that is transposed.
#[test]
fn square_weights_are_transposed_where_the_model_has_them_so() {
    let parent = tempfile::tempdir().unwrap();
    let key =
        |layer: &str, factor: &str| format!("base_model.model.h.0.{layer}.lora_{factor}.weight");
    let config = r#"{"peft_type": "LORA", "lora_alpha": 1, "fan_in_fan_out": false}"#;
    for (name, model, other, expected) in [
        (
            "gpt2",
            Some(r#"{"model_type": "gpt2"}"#),
            ("lm_head", [3, 2]),
            Some([1.0, 3.0, 2.0, 6.0]),
        ),
        (
            "bigcode",
            Some(r#"{"model_type": "gpt_bigcode"}"#),
            ("lm_head", [3, 2]),
            Some([1.0, 2.0, 3.0, 6.0]),
        ),
        // A weight of the same name tells.
        (
            "same",
            None,
            ("mlp.c_proj", [2, 3]),
            Some([1.0, 3.0, 2.0, 6.0]),
        ),
        ("unknown", None, ("lm_head", [3, 2]), None),
    ] {
        let directory = parent.path().join(name);
        std::fs::create_dir(&directory).unwrap();
        if let Some(model) = model {
            std::fs::write(directory.join("config.json"), model).unwrap();
        }
        let (layer, shape) = other;
        let weight = format!("h.0.{layer}.weight");
        let square = ("h.0.attn.c_proj.weight", tensor(&[2, 2], &[0.0; 4]));
        let base = file(
            &directory.join("base.pt"),
            vec![square, (&weight, tensor(&shape, &[0.0; 6]))],
        );
        let [a, b] = ["A", "B"].map(|factor| key("attn.c_proj", factor));
        let [other_a, other_b] = ["A", "B"].map(|factor| key(layer, factor));
        let (inputs, outputs) = (2, 3);
        let items = vec![
            (a.as_str(), tensor(&[1, 2], &[1.0, 2.0])),
            (b.as_str(), tensor(&[2, 1], &[1.0, 3.0])),
            (other_a.as_str(), tensor(&[1, inputs], &vec![1.0; inputs])),
            (other_b.as_str(), tensor(&[outputs, 1], &vec![1.0; outputs])),
        ];
        let path = directory.join("adapter");
        let adapter = adapter(&path, config, items);
        let merged = Lora::new(&*base, &*adapter, &LoraConfig::read(path).unwrap());
        let found = merged
            .map(|merged| floats(&merged, "h.0.attn.c_proj.weight"))
            .map_err(|error| with_causes(&error));
        match expected {
            Some(expected) => assert_eq!(found.unwrap(), expected, "{name}"),
            None => assert!(found.unwrap_err().contains("config.json"), "{name}"),
        }
    }
}

/// The alpha of an update by patterns, as PEFT finds it.
#[test]
fn patterns_of_alpha_and_rank_are_regular_expressions() {
    let parent = tempfile::tempdir().unwrap();
    let base = file(
        &parent.path().join("base.pt"),
        vec![("model.layers.3.q_proj.weight", tensor(&[1, 1], &[0.0]))],
    );
    let key = |factor: &str| format!("base_model.model.model.layers.3.q_proj.{factor}.weight");
    for (index, (settings, expected)) in [
        (r#""alpha_pattern": {"q.proj": 100}"#, Ok(100.0)),
        (r#""alpha_pattern": {"q\\.proj": 100}"#, Ok(1.0)),
        (
            r#""alpha_pattern": {"layers\\.[0-2]\\..*": 5, ".*_proj": 6, "q_proj": 7}"#,
            Ok(6.0),
        ),
        (
            r#""alpha_pattern": {"layers\\.(?!3)\\d\\.q_proj": 5}"#,
            Ok(1.0),
        ),
        (
            r#""alpha_pattern": {"^model\\.layers\\.3\\.q_proj$": 0.5}"#,
            Ok(0.5),
        ),
        (r#""alpha_pattern": null, "rank_pattern": null"#, Ok(1.0)),
        (r#""alpha_pattern": {"q_proj(": 5}"#, Err("`q_proj(`")),
        (r#""rank_pattern": {"[": 5}"#, Err("`[`")),
        (
            r#""r": 8, "rank_pattern": {"layers.\\d+.q_proj": 1}"#,
            Ok(1.0),
        ),
        (r#""rank_pattern": {"q_proj": 2}"#, Err("rank 1")),
        (r#""r": 8"#, Err("rank 1")),
    ]
    .into_iter()
    .enumerate()
    {
        let path = parent.path().join(index.to_string());
        let config = format!(r#"{{"peft_type": "LORA", "lora_alpha": 1, {settings}}}"#);
        let (a, b) = (key("lora_A"), key("lora_B"));
        let items = vec![
            (a.as_str(), tensor(&[1, 1], &[1.0])),
            (b.as_str(), tensor(&[1, 1], &[1.0])),
        ];
        let adapter = adapter(&path, &config, items);
        let merged =
            LoraConfig::read(path).and_then(|config| Lora::new(&*base, &*adapter, &config));
        match (merged, expected) {
            (Ok(merged), Ok(alpha)) => {
                let found = floats(&merged, "model.layers.3.q_proj.weight");
                assert_eq!(found, [alpha], "{settings}");
            }
            (Err(error), Err(what)) => {
                let text = with_causes(&error);
                assert!(text.contains(what), "{settings}: {text}");
            }
            (merged, _) => panic!("{settings}: {merged:?}"),
        }
    }
}

#[test]
fn an_adapter_that_does_not_fit_is_refused_by_its_key() {
    let parent = tempfile::tempdir().unwrap();
    let base = file(
        &parent.path().join("base.pt"),
        vec![("up.weight", tensor(&[3, 2], &[0.0; 6]))],
    );
    let plain = r#"{"peft_type": "LORA", "lora_alpha": 4}"#;
    let (a, b) = (
        || (A, tensor(&[1, 2], &[1.0; 2])),
        || (B, tensor(&[3, 1], &[1.0; 3])),
    );
    for (name, items, what) in [
        ("lonely", vec![a()], "without the other one"),
        ("lonely-b", vec![b()], "without the other one"),
        (
            "shape",
            vec![a(), (B, tensor(&[2, 1], &[1.0; 2]))],
            "[3, 2]",
        ),
        ("rank", vec![a(), (B, tensor(&[3, 2], &[1.0; 6]))], "[3, 2]"),
        (
            "bias",
            vec![
                a(),
                b(),
                ("base_model.model.up.lora_B.bias", tensor(&[3], &[1.0; 3])),
            ],
            "lora_B.bias",
        ),
        (
            "magnitude",
            vec![
                a(),
                b(),
                (
                    "base_model.model.up.lora_magnitude_vector",
                    tensor(&[3], &[1.0; 3]),
                ),
            ],
            "magnitude",
        ),
        (
            "two",
            vec![
                (
                    "base_model.model.up.lora_A.one.weight",
                    tensor(&[1, 2], &[1.0; 2]),
                ),
                (
                    "base_model.model.up.lora_B.one.weight",
                    tensor(&[3, 1], &[1.0; 3]),
                ),
                (
                    "base_model.model.up.lora_A.two.weight",
                    tensor(&[1, 2], &[1.0; 2]),
                ),
                (
                    "base_model.model.up.lora_B.two.weight",
                    tensor(&[3, 1], &[1.0; 3]),
                ),
            ],
            "a second update",
        ),
        (
            "foreign",
            vec![("up.weight", tensor(&[3, 2], &[1.0; 6]))],
            "not of an adapter",
        ),
        (
            "integers",
            vec![
                a(),
                b(),
                (
                    "base_model.model.up.base_layer.weight",
                    PlainValue::Tensor(PlainTensor {
                        dtype: DType::U8,
                        shape: vec![3, 2],
                        data: vec![0; 6],
                    }),
                ),
            ],
            "dtype",
        ),
        (
            "elsewhere",
            vec![("base_model.model.head.weight", tensor(&[3], &[1.0; 3]))],
            "without `head.weight`",
        ),
    ] {
        let path = parent.path().join(name);
        let adapter = adapter(&path, plain, items);
        let error = Lora::new(&*base, &*adapter, &LoraConfig::read(path).unwrap()).unwrap_err();
        let text = fsdp_layout::with_causes(&error);
        assert!(text.contains(what), "{name}: {text}");
    }
    for (name, config) in [
        (
            "dora",
            r#"{"peft_type": "LORA", "lora_alpha": 4, "use_dora": true}"#,
        ),
        ("ia3", r#"{"peft_type": "IA3"}"#),
        (
            "regex",
            r#"{"peft_type": "LORA", "lora_alpha": 4, "alpha_pattern": {"^up(": 1}}"#,
        ),
        ("no-alpha", r#"{"peft_type": "LORA", "r": 4}"#),
        ("no-json", "lora"),
    ] {
        let path = parent.path().join(name);
        adapter(&path, config, vec![a(), b()]);
        assert!(LoraConfig::read(path).is_err(), "{name}");
    }
}

#[test]
fn weights_that_cannot_be_averaged_are_not_mixed_with_averages() {
    let parent = tempfile::tempdir().unwrap();
    for dtype in [DType::F8E4M3Fn, DType::F8E5M2] {
        let data = vec![0x38; dtype.size_in_bytes() as usize];
        let weight = || {
            PlainValue::Tensor(PlainTensor {
                dtype,
                shape: vec![1],
                data: data.clone(),
            })
        };
        let [first, second] = ["first", "second"].map(|name| {
            file(
                &parent.path().join(name),
                vec![("weight", weight()), ("weight_scale", tensor(&[1], &[2.0]))],
            )
        });
        let text = with_causes(&Average::new(vec![&*first, &*second], &[]).unwrap_err());
        assert!(
            text.contains("`weight`") && text.contains(&dtype.to_string()),
            "{text}"
        );
        assert!(Average::new(vec![&*first], &[]).is_ok());
    }
}

#[test]
fn scales_of_quantized_weights_are_not_averaged() {
    let parent = tempfile::tempdir().unwrap();
    for (codes, dtype, scale) in [
        ("proj.weight", DType::I8, "proj.weight_scale"),
        ("proj.qweight", DType::I32, "proj.scales"),
        ("proj.weight", DType::U8, "proj.weight.absmax"),
    ] {
        let [first, second] = [1.0, 3.0].map(|number| {
            let codes_value = PlainValue::Tensor(PlainTensor {
                dtype,
                shape: vec![2, 2],
                data: vec![1; 4 * dtype.size_in_bytes() as usize],
            });
            file(
                &parent.path().join(number.to_string()),
                vec![(codes, codes_value), (scale, tensor(&[2], &[number; 2]))],
            )
        });
        let text = with_causes(&Average::new(vec![&*first, &*second], &[]).unwrap_err());
        assert!(
            text.contains(&format!("`{scale}` belongs to quantized weights")),
            "{text}"
        );
    }
}

#[test]
fn complex_numbers_are_averaged_like_others() {
    let parent = tempfile::tempdir().unwrap();
    let [first, second] = [[1.0f32, -2.0], [3.0, 4.0]].map(|number| {
        let data = number.iter().flat_map(|part| part.to_le_bytes()).collect();
        let complex = PlainTensor {
            dtype: DType::Complex64,
            shape: vec![1],
            data,
        };
        file(
            &parent.path().join(number[0].to_string()),
            vec![("c", PlainValue::Tensor(complex))],
        )
    });
    let average = Average::new(vec![&*first, &*second], &[]).unwrap();
    assert_eq!(floats(&average, "c"), [2.0, 1.0]);
    assert!(average.changes().is_empty());
}

#[test]
fn elements_of_a_merge_that_become_infinite_are_counted() {
    let parent = tempfile::tempdir().unwrap();
    let make = |name: &str, numbers: [f32; 2]| {
        file(
            &parent.path().join(name),
            vec![
                ("w", tensor(&[2, 1], &numbers)),
                ("wte", tensor(&[2, 1], &numbers)),
            ],
        )
    };
    let (first, second) = (make("a.pt", [3e38, 1.0]), make("b.pt", [-3e38, 1.0]));
    let average = Average::new(vec![&*first, &*second], &[2.0, -1.0]).unwrap();
    let to = parent.path().join("to");
    let target = OutputFormat::Dcp { ranks: 2 };
    let report = convert(&average, &to, target, ConvertOptions::default()).unwrap();
    assert_eq!(told(&report.changes, "infinite"), ["w: 1", "wte: 1"]);
}

#[test]
fn elements_that_another_source_makes_no_numbers_are_counted() {
    let parent = tempfile::tempdir().unwrap();
    let make = |name: &str, numbers: [f32; 4]| {
        file(
            &parent.path().join(name),
            vec![("w", tensor(&[2, 2], &numbers))],
        )
    };
    let first = make("a.pt", [1.0, f32::NAN, 2.0, 3.0]);
    let second = make("b.pt", [f32::NAN, f32::NAN, f32::INFINITY, 1.0]);
    let average = Average::new(vec![&*first, &*second], &[]).unwrap();
    let target = OutputFormat::SafetensorsFile;
    let to = parent.path().join("average.safetensors");
    let report = convert(&average, &to, target, ConvertOptions::default()).unwrap();
    // The NaN that the first has was there before.
    assert_eq!(told(&report.changes, "NaN or infinite"), ["w: 2"]);
    let base = file(
        &parent.path().join("base.pt"),
        vec![("up.weight", tensor(&[2, 2], &[1.0, f32::NAN, 2.0, 3.0]))],
    );
    let path = parent.path().join("adapter");
    let adapter = adapter(
        &path,
        r#"{"peft_type": "LORA", "lora_alpha": 1, "r": 1}"#,
        vec![
            (A, tensor(&[1, 2], &[1.0, 1.0])),
            (B, tensor(&[2, 1], &[f32::NAN, 1.0])),
        ],
    );
    let config = LoraConfig::read(path).unwrap();
    let merged = Lora::new(&*base, &*adapter, &config).unwrap();
    let to = parent.path().join("merged.safetensors");
    let report = convert(&merged, &to, target, ConvertOptions::default()).unwrap();
    assert_eq!(told(&report.changes, "NaN or infinite"), ["up.weight: 1"]);
}

#[test]
fn an_average_of_adapters_is_one_of_factors_of_the_same_scale() {
    let parent = tempfile::tempdir().unwrap();
    let make = |name: &str, alpha: u32| {
        adapter(
            &parent.path().join(name),
            &format!(r#"{{"peft_type": "LORA", "lora_alpha": {alpha}, "r": 1}}"#),
            vec![
                (A, tensor(&[1, 2], &[1.0, 1.0])),
                (B, tensor(&[2, 1], &[1.0, 1.0])),
            ],
        )
    };
    let (first, same, other) = (make("a", 8), make("b", 8), make("c", 16));
    let average = Average::new(vec![&*first, &*same], &[]).unwrap();
    assert_eq!(told(&average.changes(), "became averages"), [A, B]);
    let error = with_causes(&Average::new(vec![&*first, &*other], &[]).unwrap_err());
    assert!(
        error.contains("`lora_alpha`") && error.contains("merge each into the base"),
        "{error}"
    );
}

#[test]
fn opaque_weights_are_not_mixed_with_averages() {
    let quantized = opened(&crate::foreign::fixture("opaque_tensors/int8"));
    let text = with_causes(&Average::new(vec![&*quantized, &*quantized], &[]).unwrap_err());
    assert!(text.contains("torchao.quantization.Int8Tensor"), "{text}");
    assert!(Average::new(vec![&*quantized], &[]).is_ok());
}

#[test]
fn a_sound_adapter_of_another_kind_is_not_called_damaged() {
    let parent = tempfile::tempdir().unwrap();
    for kind in ["IA3", "LOHA", "PROMPT_TUNING", "ADALORA"] {
        let path = parent.path().join(kind);
        // The settings of most kinds have no `lora_alpha`, and some have one that is not a number.
        adapter(
            &path,
            &format!(r#"{{"peft_type": "{kind}", "lora_alpha": null}}"#),
            vec![],
        );
        let error = LoraConfig::read(path).unwrap_err();
        let FileError::File {
            source: FormatError::Unsupported { what },
            ..
        } = &error
        else {
            panic!("{error:?}")
        };
        assert_eq!(*what, format!("an adapter of type {kind}"));
    }
}
