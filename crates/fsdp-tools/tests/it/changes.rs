//! Nothing is lost or changed without being told: casts, names in values, scales, tied tensors, and
//! the configuration beside the weights.

use std::path::{Path, PathBuf};

use fsdp_formats::checkpoint::{Change, Checkpoint, open};
use fsdp_formats::internals::encode_value;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox, with_causes};
use fsdp_tools::convert::{
    Cast, ConfigEdits, ConvertOptions, Converted, Dequantized, OutputFormat, Rename, View, convert,
};
use fsdp_tools::map::{Map, MapError, Mapped, Values};
use tempfile::TempDir;

pub(crate) const TARGETS: [OutputFormat; 5] = [
    OutputFormat::Dcp { ranks: 3 },
    OutputFormat::SafetensorsFile,
    OutputFormat::SafetensorsDirectory {
        max_file_bytes: 300,
    },
    OutputFormat::SafetensorsShards { ranks: 2 },
    OutputFormat::Torch,
];

pub(crate) fn dict(items: Vec<(&str, PlainValue)>) -> PlainValue {
    PlainValue::Dict(
        items
            .into_iter()
            .map(|(key, value)| (key.into(), value))
            .collect(),
    )
}

pub(crate) fn tensor(dtype: DType, shape: &[usize], data: Vec<u8>) -> PlainValue {
    PlainValue::Tensor(PlainTensor {
        dtype,
        shape: shape.to_vec(),
        data,
    })
}

fn floats(shape: &[usize], numbers: &[f32]) -> PlainValue {
    let bytes = numbers.iter().flat_map(|number| number.to_le_bytes());
    tensor(DType::F32, shape, bytes.collect())
}

fn names(names: &[&str]) -> PlainValue {
    PlainValue::List(names.iter().map(|&name| name.into()).collect())
}

/// Writes a state dict as `torch.save` does.
pub(crate) fn write(parent: &TempDir, state: &PlainValue) -> PathBuf {
    let path = parent.path().join("source.pt");
    std::fs::write(&path, encode_value(state).unwrap()).unwrap();
    path
}

pub(crate) fn opened(path: &Path) -> Box<dyn Checkpoint> {
    open(path, OpenOptions::default()).unwrap()
}

pub(crate) fn bytes_of(checkpoint: &dyn Checkpoint, fqn: &str) -> (DType, Vec<u8>) {
    let tensor = checkpoint.metadata().tensor(fqn).unwrap();
    let bounds = TensorBox::whole(&tensor.shape);
    let dtype = tensor.properties.dtype;
    let mut bytes = vec![0; bounds.numel() * dtype.size_in_bytes() as usize];
    checkpoint.read_box(fqn, &bounds, &mut bytes).unwrap();
    (dtype, bytes)
}

/// Returns the names in the changes whose line has this text.
pub(crate) fn told(changes: &[Change], text: &str) -> Vec<String> {
    let fitting = changes.iter().filter(|change| change.line().contains(text));
    fitting.flat_map(|change| change.names.clone()).collect()
}

fn to(source: &dyn Checkpoint, destination: &Path, target: OutputFormat) -> Converted {
    let options = ConvertOptions {
        overwrite: true,
        ..ConvertOptions::default()
    };
    convert(source, destination, target, options).unwrap()
}

fn cast_to(source: &dyn Checkpoint, dtype: DType, with_optimizer: bool) -> View<'_> {
    let cast = Cast {
        dtype,
        with_optimizer,
    };
    View::new(source, |_| Rename::Keep, Some(cast)).unwrap()
}

#[test]
fn elements_that_a_cast_loses_are_counted_in_every_format() {
    let parent = TempDir::new().unwrap();
    let numbers = [70000.0, -1e30, f32::INFINITY, 1.0, f32::NAN, 65504.0];
    let small = [1e-30, -1e-20, 0.0, -0.0, f32::NAN, 6e-8, 1e-45];
    let doubles = |number: f64| tensor(DType::F64, &[1], number.to_le_bytes().into());
    let state = dict(vec![
        ("fits", floats(&[2], &[1.0, 2.0])),
        ("large", floats(&[6], &numbers)),
        ("small", floats(&[7], &small)),
        ("wide", doubles(1e300)),
        ("narrow", doubles(-1e-300)),
    ]);
    let source = opened(&write(&parent, &state));
    for (dtype, infinite, zero) in [
        (
            DType::F16,
            vec!["large: 2", "wide: 1"],
            vec!["narrow: 1", "small: 3"],
        ),
        (DType::BF16, vec!["wide: 1"], vec!["narrow: 1", "small: 1"]),
        (DType::F32, vec!["wide: 1"], vec!["narrow: 1"]),
        (DType::F64, vec![], vec![]),
    ] {
        for (number, target) in TARGETS.into_iter().enumerate() {
            let view = cast_to(&*source, dtype, false);
            let report = to(&view, &parent.path().join(number.to_string()), target);
            let lost = ["infinite", "zeros"].map(|text| told(&report.changes, text));
            assert_eq!(lost[0], infinite, "{dtype} {target:?}");
            assert_eq!(lost[1], zero, "{dtype} {target:?}");
        }
    }
}

#[test]
fn products_with_scales_that_are_lost_are_counted() {
    let parent = TempDir::new().unwrap();
    // The codes of 448, 1, the smallest number, and zero.
    let codes = |codes: [u8; 4]| tensor(DType::F8E4M3Fn, &[4], codes.into());
    let state = dict(vec![
        ("a.weight", codes([0x7e, 0x38, 0x01, 0x00])),
        ("a.weight_scale", floats(&[], &[200.0])),
        ("b.weight", codes([0x7e, 0x38, 0x01, 0x00])),
        ("b.weight_scale", floats(&[], &[1e-6])),
    ]);
    let source = opened(&write(&parent, &state));
    let view = Dequantized::new(&*source, DType::F16, None, &|_| true).unwrap();
    let report = to(&view, &parent.path().join("to"), OutputFormat::Torch);
    assert_eq!(told(&report.changes, "infinite"), ["a.weight: 1"]);
    assert_eq!(told(&report.changes, "zeros"), ["b.weight: 1"]);
}

#[test]
fn hyperparameters_counts_and_scales_are_never_cast() {
    let parent = TempDir::new().unwrap();
    let scalar = || floats(&[], &[0.0025]);
    let state = dict(vec![
        (
            "model",
            dict(vec![
                ("w", floats(&[2], &[1.5, 2.5])),
                ("num_steps", scalar()),
            ]),
        ),
        (
            "optim",
            dict(vec![
                (
                    "state",
                    dict(vec![(
                        "w",
                        dict(vec![
                            ("exp_avg", floats(&[2], &[0.1, 0.2])),
                            ("step", floats(&[1], &[1001.0])),
                            ("eta", scalar()),
                            ("mu_product", scalar()),
                        ]),
                    )]),
                ),
                (
                    "param_groups",
                    PlainValue::List(vec![dict(vec![
                        ("lr", scalar()),
                        ("per_layer", floats(&[2], &[0.1, 0.2])),
                        ("params", names(&["w"])),
                    ])]),
                ),
            ]),
        ),
        (
            "lr_scheduler",
            dict(vec![("base_lrs", PlainValue::List(vec![scalar()]))]),
        ),
        ("grad_scaler", dict(vec![("_scale", scalar())])),
    ]);
    let source = opened(&write(&parent, &state));
    let view = cast_to(&*source, DType::BF16, true);
    let mut cast = Vec::new();
    for (fqn, tensor) in view.metadata().tensors() {
        if tensor.properties.dtype == DType::BF16 {
            cast.push(fqn);
        }
    }
    assert_eq!(cast, ["model.w", "optim.state.w.exp_avg"]);
    let kept = told(&view.changes(), "hyperparameters, counts or scales");
    assert_eq!(
        kept.len(),
        source.metadata().tensors().count() - 2,
        "{kept:?}"
    );
    assert!(
        kept.contains(&"optim.param_groups.0.lr".to_owned()),
        "{kept:?}"
    );
}

/// Weights of 8 bits and their scales, as DeepSeek-V3, compressed-tensors, GPTQ and bitsandbytes
/// write them.
fn quantized_state() -> PlainValue {
    let codes = |shape: &[usize]| {
        let count = shape.iter().product();
        tensor(
            DType::F8E4M3Fn,
            shape,
            (0..count)
                .map(|code: usize| (code * 7 % 120) as u8)
                .collect(),
        )
    };
    let scales = |shape: &[usize]| {
        let count: usize = shape.iter().product();
        let numbers: Vec<f32> = (0..count).map(|index| 0.001 + index as f32 / 3.0).collect();
        floats(shape, &numbers)
    };
    dict(vec![
        ("norm.weight", scales(&[4])),
        ("logit_scale", scales(&[])),
        ("block.gate.weight", codes(&[300, 200])),
        ("block.gate.weight_scale_inv", scales(&[3, 2])),
        ("row.weight", codes(&[6, 5])),
        ("row.weight_scale", scales(&[6, 1])),
        ("row.input_scale", scales(&[1])),
        ("all.weight", codes(&[6, 5])),
        ("all.weight_scale", scales(&[])),
        ("mlp.experts.down_proj", codes(&[2, 130, 7])),
        ("mlp.experts.down_proj_scale_inv", scales(&[2, 2, 1])),
    ])
}

#[test]
fn scales_beside_weights_of_8_bits_are_left_alone_and_told() {
    let parent = TempDir::new().unwrap();
    let source = opened(&write(&parent, &quantized_state()));
    let view = cast_to(&*source, DType::BF16, false);
    for (fqn, tensor) in source.metadata().tensors() {
        let is_cast = ["norm.weight", "logit_scale"].contains(&fqn);
        let dtype = view.metadata().tensor(fqn).unwrap().properties.dtype;
        assert_eq!(is_cast, dtype == DType::BF16, "{fqn}");
        assert!(is_cast || dtype == tensor.properties.dtype, "{fqn}");
    }
    let changes = view.changes();
    assert_eq!(
        told(&changes, "scales are never cast").len(),
        5,
        "{changes:?}"
    );
    assert_eq!(told(&changes, "`--dequantize`").len(), 4, "{changes:?}");
    assert!(told(&changes, "`--dequantize`").contains(&"row.weight: float8_e4m3fn".to_owned()));
}

#[test]
fn scales_of_every_quantizer_are_left_alone() {
    let parent = TempDir::new().unwrap();
    let codes = |dtype: DType| tensor(dtype, &[2, 2], vec![1; 4 * dtype.size_in_bytes() as usize]);
    let scale = || floats(&[2, 1], &[0.1, 0.3]);
    // The tensor of codes, and what gives the codes their meaning.
    for (name, dtype, scales) in [
        ("weight", DType::U32, &["scales", "biases"][..]),
        (
            "weight._data",
            DType::U8,
            &["weight._scale", "weight._shift"],
        ),
        (
            "weight:qdata",
            DType::I8,
            &["weight:scale", "weight:zero_point"],
        ),
        ("codes", DType::I16, &["codebooks", "scales"]),
        ("weight", DType::I16, &["scales", "tables", "tables2"]),
        ("gate_up_proj_blocks", DType::U8, &["gate_up_proj_scales"]),
        ("W_q", DType::U8, &["scale", "zero"]),
    ] {
        let mut items = vec![("layer.norm".to_owned(), scale())];
        items.push((format!("layer.proj.{name}"), codes(dtype)));
        for scale_name in scales {
            items.push((format!("layer.proj.{scale_name}"), scale()));
        }
        let items = items
            .iter()
            .map(|(key, value)| (key.as_str(), value.clone()));
        let source = opened(&write(&parent, &dict(items.collect())));
        let view = cast_to(&*source, DType::BF16, false);
        let kept = told(&view.changes(), "scales are never cast").len();
        assert_eq!(kept, scales.len(), "{name}: {:?}", view.changes());
        let is_cast =
            |key: &str| view.metadata().tensor(key).unwrap().properties.dtype == DType::BF16;
        assert!(is_cast("layer.norm"));
    }
}

#[test]
fn dequantized_weights_are_the_products_with_their_scales() {
    let parent = TempDir::new().unwrap();
    let source = opened(&write(&parent, &quantized_state()));
    let number_of = |fqn: &str, index: usize| {
        let (dtype, bytes) = bytes_of(&*source, fqn);
        let mut numbers = Vec::new();
        fsdp_tools::elements::for_each_number(dtype, &bytes, &mut |number| numbers.push(number));
        numbers[index] as f32
    };
    for dtype in [DType::BF16, DType::F32] {
        let view = Dequantized::new(&*source, dtype, None, &|_| true).unwrap();
        assert_eq!(told(&view.changes(), "multiplied by its scale").len(), 4);
        assert_eq!(told(&view.changes(), "activations"), ["row.input_scale"]);
        for (number, target) in TARGETS.into_iter().enumerate() {
            let path = parent.path().join(format!("{dtype}-{number}"));
            to(&view, &path, target);
            let written = opened(&path);
            assert_eq!(written.metadata().tensors().count(), 6);
            for (fqn, scale, columns, scale_columns) in [
                ("block.gate.weight", "block.gate.weight_scale_inv", 200, 2),
                ("row.weight", "row.weight_scale", 5, 1),
                ("all.weight", "all.weight_scale", 5, 0),
                (
                    "mlp.experts.down_proj",
                    "mlp.experts.down_proj_scale_inv",
                    7,
                    1,
                ),
            ] {
                let (written_dtype, bytes) = bytes_of(&*written, fqn);
                assert_eq!(written_dtype, dtype);
                let (_, codes) = bytes_of(&*source, fqn);
                // A few places, at the edges of blocks among them.
                for index in [0, 1, columns - 1, columns, codes.len() / 2, codes.len() - 1] {
                    let (row, column) = (index / columns, index % columns);
                    let scale_index = match scale_columns {
                        0 => 0,
                        1 if fqn == "row.weight" => row,
                        1 => row / 130 * 2 + row % 130 / 128,
                        _ => row / 128 * 2 + column / 128,
                    };
                    let product = number_of(fqn, index) * number_of(scale, scale_index);
                    let size = dtype.size_in_bytes() as usize;
                    let element = &bytes[index * size..][..size];
                    let expected = match dtype {
                        DType::F32 => product.to_le_bytes().to_vec(),
                        _ => half::bf16::from_f32(product).to_le_bytes().to_vec(),
                    };
                    assert_eq!(element, expected, "{fqn} at {row}, {column} in {target:?}");
                }
            }
        }
    }
}

#[test]
fn weights_that_cannot_be_dequantized_are_errors_that_name_them() {
    let parent = TempDir::new().unwrap();
    let eight = || tensor(DType::F8E4M3Fn, &[2, 2], vec![1; 4]);
    let packed = || tensor(DType::I32, &[2, 2], vec![1; 16]);
    for (state, name) in [
        (vec![("a.weight", eight())], "a.weight"),
        (
            vec![("a.weight", tensor(DType::I8, &[2, 2], vec![1; 4]))],
            "a.weight",
        ),
        (
            vec![("a.weight", tensor(DType::U8, &[2, 2], vec![1; 4]))],
            "a.weight",
        ),
        (
            vec![
                ("a.weight", eight()),
                ("a.weight_scale", floats(&[3, 1], &[1.0; 3])),
            ],
            "a.weight",
        ),
        (
            vec![
                ("a.qweight", packed()),
                ("a.scales", floats(&[2], &[1.0; 2])),
            ],
            "a.qweight",
        ),
        (
            vec![
                ("a.weight", tensor(DType::U8, &[2, 2], vec![1; 4])),
                ("a.weight_scale", floats(&[2], &[1.0; 2])),
            ],
            "a.weight",
        ),
    ] {
        let source = opened(&write(&parent, &dict(state)));
        let error = Dequantized::new(&*source, DType::BF16, None, &|_| true).unwrap_err();
        let text = with_causes(&error);
        assert!(text.contains(name), "{text}");
        // What is left out needs no scale.
        let without = |fqn: &str| fqn != name;
        let view = Dequantized::new(&*source, DType::BF16, None, &without).unwrap();
        assert!(view.is_empty());
    }
}

#[test]
fn the_blocks_of_scales_are_those_of_the_configuration_and_are_never_guessed() {
    let parent = TempDir::new().unwrap();
    let state = |dtype, shape: [usize; 2], scales: [usize; 2]| {
        let numbers: Vec<f32> = (0..scales[0] * scales[1])
            .map(|index| index as f32)
            .collect();
        let codes = vec![1; shape[0] * shape[1]];
        opened(&write(
            &parent,
            &dict(vec![
                ("a.weight", tensor(dtype, &shape, codes)),
                ("a.weight_scale", floats(&scales, &numbers)),
                ("a.mask", tensor(DType::I8, &[1, 1], vec![1])),
            ]),
        ))
    };
    // Several lengths of blocks make 4 by 5 scales.
    let ragged = state(DType::F8E4M3Fn, [200, 300], [4, 5]);
    for (block, is_right) in [
        (None, false),
        (Some([128, 128]), false),
        (Some([64, 64]), true),
    ] {
        let view = Dequantized::new(&*ragged, DType::F32, block, &|_| true);
        assert_eq!(view.is_ok(), is_right, "{block:?}");
        if let Err(error) = view {
            let text = with_causes(&error);
            assert!(
                text.contains("a.weight") && text.contains("config.json"),
                "{text}"
            );
        }
    }
    // Groups of 96, where groups of 128 would be as many.
    let groups = state(DType::I8, [2, 192], [2, 2]);
    let view = Dequantized::new(&*groups, DType::F32, Some([1, 96]), &|_| true).unwrap();
    let mut bytes = [0; 8];
    let bounds = TensorBox::new(vec![1, 95], vec![1, 2]);
    view.read_box("a.weight", &bounds, &mut bytes).unwrap();
    assert_eq!(bytes, [2f32.to_le_bytes(), 3f32.to_le_bytes()].concat()[..]);
    assert_eq!(told(&view.changes(), "kept its codes"), ["a.mask"]);
}

/// A model with a training state: `state` under names or numbers, and the groups' names.
fn training_state(has_state: bool) -> PlainValue {
    let moments = || dict(vec![("exp_avg", floats(&[2], &[0.1, 0.2]))]);
    let state = match has_state {
        true => dict(vec![("a.w", moments()), ("a.b", moments())]),
        false => dict(vec![]),
    };
    let group = |name: &str| {
        dict(vec![
            ("lr", PlainValue::Float(0.1)),
            ("params", names(&[name])),
        ])
    };
    dict(vec![
        (
            "model",
            dict(vec![
                ("a.w", floats(&[2], &[1.0, 2.0])),
                ("a.b", floats(&[2], &[3.0, 4.0])),
            ]),
        ),
        (
            "optim",
            dict(vec![
                ("state", state),
                (
                    "param_groups",
                    PlainValue::List(vec![group("a.w"), group("a.b")]),
                ),
            ]),
        ),
    ])
}

fn renamed(rules: &'static [(&str, &str)]) -> impl Fn(&str) -> Rename {
    move |key: &str| {
        let rule = rules.iter().find_map(|(old, new)| {
            key.strip_prefix(old)
                .map(|rest| Rename::To(format!("{new}{rest}")))
        });
        rule.unwrap_or(Rename::Keep)
    }
}

#[test]
fn names_of_parameters_in_values_follow_the_keys() {
    let parent = TempDir::new().unwrap();
    let with_rules = Map::parse(
        "model.a.{p} -> model.net.x.{p}\noptim.state.a.{p}.{leaf} -> optim.state.net.x.{p}.{leaf}",
        &Values::new(),
    )
    .unwrap();
    let model_only = Map::parse("model.a.{p} -> model.net.x.{p}", &Values::new()).unwrap();
    for has_state in [true, false] {
        let source = opened(&write(&parent, &training_state(has_state)));
        let rules: &[(&str, &str)] = &[
            ("model.a.", "model.net.x."),
            ("optim.state.a.", "optim.state.net.x."),
        ];
        let view = View::new(&*source, renamed(rules), None).unwrap();
        let mapped =
            Mapped::new(&*source, if has_state { &with_rules } else { &model_only }).unwrap();
        for (kind, checkpoint) in [("view", &view as &dyn Checkpoint), ("map", &mapped)] {
            for (number, target) in TARGETS.into_iter().enumerate() {
                let path = parent.path().join(format!("{has_state}-{kind}-{number}"));
                let report = to(checkpoint, &path, target);
                let written = opened(&path);
                for (index, name) in ["net.x.w", "net.x.b"].into_iter().enumerate() {
                    let key = format!("optim.param_groups.{index}.params");
                    assert_eq!(
                        written.read_value(&key).unwrap(),
                        names(&[name]),
                        "{target:?}"
                    );
                }
                assert_eq!(told(&report.changes, "new names of parameters").len(), 2);
                assert_eq!(told(&report.changes, "kept the old name"), [""; 0]);
            }
        }
    }
    // Names that go on being those of the state stay, and are told.
    let source = opened(&write(&parent, &training_state(true)));
    let view = View::new(&*source, renamed(&[("model.a.", "model.net.x.")]), None).unwrap();
    assert_eq!(
        view.read_value("optim.param_groups.0.params").unwrap(),
        names(&["a.w"])
    );
    assert_eq!(told(&view.changes(), "kept the old name"), ["a.w", "a.b"]);
    // The names in the model's own keys do not change when only its prefix goes.
    let view = View::new(&*source, renamed(&[("model.", "")]), None).unwrap();
    assert_eq!(view.changes(), []);
}

#[test]
fn integer_keys_of_optimizer_state_come_back_where_they_can() {
    let parent = TempDir::new().unwrap();
    let moments = || dict(vec![("exp_avg", floats(&[2], &[0.1, 0.2]))]);
    let ids = PlainValue::List(vec![PlainValue::Int(0), PlainValue::Int(1)]);
    let state = dict(vec![(
        "optimizer",
        dict(vec![
            (
                "state",
                PlainValue::Dict(vec![
                    (PlainValue::Int(0), moments()),
                    (PlainValue::Int(1), moments()),
                ]),
            ),
            (
                "param_groups",
                PlainValue::List(vec![dict(vec![("params", ids)])]),
            ),
        ]),
    )]);
    let source = opened(&write(&parent, &state));
    let structure = source.structure().unwrap();
    for target in TARGETS
        .into_iter()
        .filter(|target| *target != OutputFormat::Torch)
    {
        let (middle, back) = (parent.path().join("middle"), parent.path().join("back.pt"));
        let report = to(&*source, &middle, target);
        assert_eq!(report.containers, ["optimizer.state: keys of type int"]);
        let report = to(&*opened(&middle), &back, OutputFormat::Torch);
        assert_eq!(
            told(&report.changes, "became the integer"),
            ["optimizer.state.0", "optimizer.state.1"]
        );
        assert_eq!(opened(&back).structure(), Some(structure), "{target:?}");
        std::fs::remove_dir_all(&middle)
            .or_else(|_| std::fs::remove_file(&middle))
            .unwrap();
    }
}

#[test]
fn an_optimizer_without_state_has_an_empty_one_in_a_file_of_torch() {
    let parent = TempDir::new().unwrap();
    let ids = PlainValue::List(vec![PlainValue::Int(0)]);
    let groups = PlainValue::List(vec![dict(vec![("params", ids), ("momentum", 0.0.into())])]);
    let optimizer = dict(vec![("state", dict(vec![])), ("param_groups", groups)]);
    let state = dict(vec![("w", floats(&[1], &[1.0])), ("optim", optimizer)]);
    let source = opened(&write(&parent, &state));
    let (middle, back) = (parent.path().join("middle"), parent.path().join("back.pt"));
    to(&*source, &middle, OutputFormat::Dcp { ranks: 1 });
    let report = to(&*opened(&middle), &back, OutputFormat::Torch);
    assert_eq!(told(&report.changes, "was added, empty"), ["optim.state"]);
    assert_eq!(opened(&back).structure(), source.structure());
}

#[test]
fn tensors_that_are_taken_for_state_of_an_optimizer_are_listed_if_they_are_not_cast() {
    let parent = TempDir::new().unwrap();
    let layer = dict(vec![("weight", floats(&[2], &[1.0, 2.0]))]);
    let state = dict(vec![("optim", layer), ("w", floats(&[1], &[1.0]))]);
    let source = opened(&write(&parent, &state));
    let kept = "as state of an optimizer by the key";
    let view = cast_to(&*source, DType::BF16, false);
    assert_eq!(told(&view.changes(), kept), ["optim.weight"]);
    let view = cast_to(&*source, DType::BF16, true);
    assert_eq!(told(&view.changes(), kept), [""; 0]);
}

#[test]
fn a_copied_configuration_says_what_the_weights_are() {
    let parent = TempDir::new().unwrap();
    let source = opened(&write(&parent, &dict(vec![("w", floats(&[1], &[1.0]))])));
    let with = parent.path().join("with");
    std::fs::create_dir(&with).unwrap();
    let config = r#"{"model_type": "x", "torch_dtype": "torch.float32", "rope": 1e-06,
        "text_config": {"dtype": "float32"}, "vision_config": {"dtype": "bfloat16"},
        "quantization_config": {"quant_method": "fp8", "dtype": "float32"}}"#;
    std::fs::write(with.join("config.json"), config).unwrap();
    let location = with.clone().into();
    let options = |config: ConfigEdits| ConvertOptions {
        with: Some(&location),
        overwrite: true,
        config,
        ..ConvertOptions::default()
    };
    let target = OutputFormat::SafetensorsDirectory {
        max_file_bytes: 300,
    };
    let path = parent.path().join("hf");
    let edits = ConfigEdits {
        dtype: Some(DType::BF16),
        is_dequantized: false,
    };
    let report = convert(&*source, &path, target, options(edits)).unwrap();
    let read = || -> serde_json::Value {
        serde_json::from_slice(&std::fs::read(path.join("config.json")).unwrap()).unwrap()
    };
    assert_eq!(read()["torch_dtype"], "torch.bfloat16");
    assert_eq!(read()["text_config"]["dtype"], "bfloat16");
    assert_eq!(read()["quantization_config"]["dtype"], "float32");
    assert_eq!(
        told(&report.changes, "changed with the weights"),
        [
            "torch_dtype: float32 -> bfloat16",
            "text_config.dtype: float32 -> bfloat16"
        ]
    );
    let edits = ConfigEdits {
        dtype: None,
        is_dequantized: true,
    };
    let report = convert(&*source, &path, target, options(edits)).unwrap();
    assert_eq!(read().get("quantization_config"), None);
    assert_eq!(read()["torch_dtype"], "torch.float32");
    assert_eq!(
        told(&report.changes, "changed with the weights"),
        ["quantization_config: removed"]
    );
    // Without edits the file stays as it is, byte for byte; one that cannot be read is told.
    let report = convert(&*source, &path, target, options(ConfigEdits::default())).unwrap();
    assert_eq!(told(&report.changes, "differed from the weights"), [""; 0]);
    let half = cast_to(&*source, DType::F16, false);
    let half_path = parent.path().join("half");
    let report = convert(&half, &half_path, target, options(ConfigEdits::default())).unwrap();
    assert_eq!(
        told(&report.changes, "differed from the weights"),
        ["torch_dtype: float32, though most weights are float16"]
    );
    assert_eq!(
        std::fs::read_to_string(path.join("config.json")).unwrap(),
        config
    );
    std::fs::write(with.join("config.json"), "{").unwrap();
    let report = convert(&*source, &path, target, options(edits)).unwrap();
    assert_eq!(
        told(&report.changes, "could not be understood"),
        ["config.json"]
    );
    assert!(
        fsdp_tools::verify::verify(
            &*opened(&path),
            fsdp_tools::verify::Level::Deep,
            fsdp_tools::verify::VerifyOptions::default()
        )
        .unwrap()
        .is_ok()
    );
}

#[test]
fn built_in_maps_refuse_layers_that_they_do_not_name() {
    let parent = TempDir::new().unwrap();
    let values = Values::from([("heads".to_owned(), 2), ("kv_heads".to_owned(), 1)]);
    let weight = || floats(&[4, 4], &[1.0; 16]);
    for (name, known, unknown) in [
        (
            "llama-to-hf",
            "layers.0.attention.wo.weight",
            "layers.0.attention.q_norm.weight",
        ),
        (
            "hf-to-llama",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.self_attn.q_proj.bias",
        ),
        (
            "nanogpt-to-hf",
            "transformer.h.0.mlp.c_fc.weight",
            "transformer.h.0.attn.q_norm.weight",
        ),
        (
            "megatron-to-hf",
            "decoder.layers.0.mlp.linear_fc2.weight",
            "decoder.layers.0.mlp.linear_fc2.bias",
        ),
        (
            "fused-to-hf",
            "model.layers.0.mlp.gate_up_proj.weight",
            "model.layers.0.mlp.experts.w13_weight",
        ),
        (
            "hf-to-qwen3-moe",
            "model.layers.0.mlp.experts.0.down_proj.weight",
            "model.layers.0.mlp.experts.0.down_proj.bias",
        ),
    ] {
        let map = Map::builtin(name, &values).unwrap().unwrap();
        let state = dict(vec![(known, weight()), ("other.weight", weight())]);
        let source = opened(&write(&parent, &state));
        let mapped = Mapped::new(&*source, &map).unwrap();
        let unmatched = told(&mapped.changes(), "no rule of the map");
        assert_eq!(unmatched, ["other.weight"], "{name}");
        let state = dict(vec![(known, weight()), (unknown, weight())]);
        let source = opened(&write(&parent, &state));
        let error = Mapped::new(&*source, &map).unwrap_err();
        assert!(
            matches!(error, MapError::Unnamed { count: 1, .. }),
            "{name}: {error}"
        );
        assert!(error.to_string().contains(unknown), "{name}: {error}");
    }
}

#[test]
fn a_map_copies_a_tied_tensor() {
    let parent = TempDir::new().unwrap();
    let state = dict(vec![("embed.weight", floats(&[2], &[1.0, 2.0]))]);
    let source = opened(&write(&parent, &state));
    let text = "copy embed.weight -> lm_head.weight\nembed.weight -> model.embed.weight";
    let map = Map::parse(text, &Values::new()).unwrap();
    let mapped = Mapped::new(&*source, &map).unwrap();
    let path = parent.path().join("copied.safetensors");
    to(&mapped, &path, OutputFormat::SafetensorsFile);
    let copied = opened(&path);
    for fqn in ["lm_head.weight", "model.embed.weight"] {
        assert_eq!(bytes_of(&*copied, fqn), bytes_of(&*source, "embed.weight"));
    }
    // Back, the copy stays: it may have changed since.
    let back = Mapped::new(&*copied, &map.reversed()).unwrap();
    assert_eq!(
        told(&back.changes(), "no rule of the map"),
        ["lm_head.weight"]
    );
    assert!(Map::parse("copy a -> b | transpose", &Values::new()).is_err());
    for bad in [
        "embed.{p} -> .{p}",
        "embed.{p} -> a..{p}",
        "embed.{p} -> a.{p}.",
    ] {
        let map = Map::parse(bad, &Values::new()).unwrap();
        let error = Mapped::new(&*source, &map).unwrap_err();
        assert!(error.to_string().contains("a dot too many"), "{error}");
    }
}

#[test]
fn experts_are_stacked_as_transformers_5_has_them_and_back() {
    let parent = TempDir::new().unwrap();
    let count = |shape: &[usize], start: usize| {
        let numbers: Vec<f32> = (0..shape.iter().product())
            .map(|index: usize| (start + index) as f32)
            .collect();
        floats(shape, &numbers)
    };
    let numbers_of = |checkpoint: &dyn Checkpoint, fqn: &str| -> Vec<f32> {
        let (_, bytes) = bytes_of(checkpoint, fqn);
        bytes
            .as_chunks::<4>()
            .0
            .iter()
            .map(|bytes| f32::from_le_bytes(*bytes))
            .collect()
    };
    let layer = "model.layers.3.mlp";
    for (name, gate, up, down) in [
        (
            "qwen3-moe",
            "mlp.experts.{e}.gate_proj.weight",
            "mlp.experts.{e}.up_proj.weight",
            "mlp.experts.{e}.down_proj.weight",
        ),
        (
            "deepseek-v3",
            "mlp.experts.{e}.gate_proj.weight",
            "mlp.experts.{e}.up_proj.weight",
            "mlp.experts.{e}.down_proj.weight",
        ),
        (
            "mixtral",
            "block_sparse_moe.experts.{e}.w1.weight",
            "block_sparse_moe.experts.{e}.w3.weight",
            "block_sparse_moe.experts.{e}.w2.weight",
        ),
        (
            "gpt-oss",
            "mlp.experts.{e}.gate_proj.weight",
            "mlp.experts.{e}.up_proj.weight",
            "mlp.experts.{e}.down_proj.weight",
        ),
    ] {
        let mut state = Vec::new();
        for expert in 0..12 {
            for (number, (template, shape)) in [(gate, [2, 3]), (up, [2, 3]), (down, [3, 2])]
                .into_iter()
                .enumerate()
            {
                let key = format!(
                    "model.layers.3.{}",
                    template.replace("{e}", &expert.to_string())
                );
                state.push((key.into(), count(&shape, 100 * expert + 10 * number)));
            }
        }
        let source = opened(&write(&parent, &PlainValue::Dict(state)));
        let to_stacked = Map::builtin(&format!("hf-to-{name}"), &Values::new())
            .unwrap()
            .unwrap();
        let stacked = Mapped::new(&*source, &to_stacked).unwrap();
        let gate_up = numbers_of(&stacked, &format!("{layer}.experts.gate_up_proj"));
        let shape = &stacked
            .metadata()
            .tensor(&format!("{layer}.experts.gate_up_proj"))
            .unwrap()
            .shape;
        if name == "gpt-oss" {
            assert_eq!(shape, &[12, 3, 4]);
            // Inputs first; gate and up by turns.
            assert_eq!(gate_up[..8], [0.0, 10.0, 3.0, 13.0, 1.0, 11.0, 4.0, 14.0]);
        } else {
            assert_eq!(shape, &[12, 4, 3]);
            assert_eq!(gate_up[..8], [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 10.0, 11.0]);
            assert_eq!(gate_up[12 * 11], 1100.0);
        }
        let apart = Map::builtin(&format!("{name}-to-hf"), &Values::new())
            .unwrap()
            .unwrap();
        let back = Mapped::new(&stacked, &apart).unwrap();
        assert_eq!(back.metadata().tensors().count(), 36);
        for (fqn, _) in source.metadata().tensors() {
            assert_eq!(
                bytes_of(&back, fqn),
                bytes_of(&*source, fqn),
                "{name} {fqn}"
            );
        }
    }
}

#[test]
fn tied_tensors_that_become_two_are_told() {
    let parent = TempDir::new().unwrap();
    let source = opened(&crate::foreign::fixture("tied.pt"));
    for (number, target) in TARGETS.into_iter().enumerate() {
        let path = parent.path().join(number.to_string());
        let report = to(&*source, &path, target);
        assert_eq!(
            told(&report.changes, "another tensor"),
            ["flat: embed.weight", "lm_head.weight: embed.weight"]
        );
    }
    // A part of a tensor, and a column of it.
    let views = opened(&crate::foreign::fixture("views.pt"));
    let report = to(&*views, &parent.path().join("views"), OutputFormat::Torch);
    assert_eq!(
        told(&report.changes, "another tensor"),
        ["column: qkv", "k: qkv", "q: qkv"]
    );
    // Also where they are renamed or cast, but not where only one of them is written.
    let path = parent.path().join("view");
    let view = View::new(&*source, renamed(&[("embed.", "x.")]), None).unwrap();
    let view = cast_to(&view, DType::BF16, false);
    let report = to(&view, &path, OutputFormat::Torch);
    assert_eq!(
        told(&report.changes, "another tensor"),
        ["flat: x.weight", "lm_head.weight: x.weight"]
    );
    let without = |key: &str| match key {
        "embed.weight" | "flat" => Rename::Drop,
        _ => Rename::Keep,
    };
    let view = View::new(&*source, without, None).unwrap();
    let report = to(&view, &path, OutputFormat::Torch);
    assert_eq!(told(&report.changes, "another tensor"), [""; 0]);
}
