//! Conversions keep the nested containers of a state dict: the types of keys, tuples, and what is
//! empty.

use std::path::Path;

use fsdp_formats::FileError;
use fsdp_formats::checkpoint::open;
use fsdp_formats::digest::digest;
use fsdp_formats::internals::{decode_value, encode_value};
use fsdp_formats::reader::OpenOptions;
use fsdp_formats::storage::Durable;
use fsdp_layout::{DType, PlainTensor, PlainValue, PythonType};
use fsdp_tools::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_tools::diff::{DiffOptions, Difference, diff};
use fsdp_tools::verify::{Level, VerifyOptions, verify};

use crate::state::{State, save};

fn tensor(value: u8) -> PlainValue {
    PlainValue::Tensor(PlainTensor {
        dtype: DType::U8,
        shape: vec![2],
        data: vec![value; 2],
    })
}

fn dict<const N: usize>(entries: [(PlainValue, PlainValue); N]) -> PlainValue {
    PlainValue::Dict(entries.into())
}

fn empty() -> PlainValue {
    PlainValue::Dict(Vec::new())
}

#[test]
fn dicts_with_keys_that_have_no_text_are_one_value_each_however_many_there_are() {
    let parent = tempfile::tempdir().unwrap();
    let long_integer = PlainValue::BigInt(vec![0, 0, 0, 0, 0, 0, 0, 0, 1]);
    for key in [long_integer, tensor(3)] {
        let count = dict([("count".into(), PlainValue::Int(2))]);
        let seen = dict([(key, count)]);
        let state = dict([
            ("model".into(), dict([("w".into(), tensor(1))])),
            ("seen".into(), PlainValue::List(vec![seen.clone(); 300])),
        ]);
        assert_eq!(converted(&state, parent.path()), state);
        let source = open(parent.path().join("from.pt"), OpenOptions::default()).unwrap();
        let to = parent.path().join("to.safetensors");
        let options = ConvertOptions {
            overwrite: true,
            ..ConvertOptions::default()
        };
        convert(&*source, &to, OutputFormat::SafetensorsFile, options).unwrap();
        let written = open(&to, OpenOptions::default()).unwrap();
        assert_eq!(written.read_value("seen.299").unwrap(), seen);
    }
}

/// Writes a value as `torch.save` does, and returns what a conversion to the same format makes of
/// it.
fn converted(value: &PlainValue, parent: &Path) -> PlainValue {
    let (from, to) = (parent.join("from.pt"), parent.join("to.pt"));
    std::fs::write(&from, encode_value(value).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let options = ConvertOptions {
        overwrite: true,
        ..ConvertOptions::default()
    };
    convert(&*source, &to, OutputFormat::Torch, options).unwrap();
    decode_value(&std::fs::read(&to).unwrap()).unwrap()
}

/// Returns values of all types that a simpler value describes.
fn typed() -> Vec<(PlainValue, PlainValue)> {
    let describe = |of| match of {
        PythonType::DType => "torch.float8_e4m3fn".into(),
        PythonType::QScheme => "torch.per_tensor_affine".into(),
        PythonType::Size => PlainValue::Tuple(vec![PlainValue::Int(2), PlainValue::Int(1 << 40)]),
        PythonType::FrozenSet => PlainValue::Set(vec![PlainValue::Int(1)]),
        PythonType::ByteArray => PlainValue::Bytes(vec![0, 200]),
        PythonType::Device => "cuda:1".into(),
        _ => "/a/b".into(),
    };
    // A file of torch has other types for those of NumPy.
    PythonType::ALL
        .iter()
        .copied()
        .filter(|of| !of.name().starts_with("numpy."))
        .map(|of| {
            (
                of.name().replace('.', "_").into(),
                PlainValue::typed(of, describe(of)),
            )
        })
        .collect()
}

/// The state of an optimizer, whose keys are numbers.
fn optimizer() -> PlainValue {
    dict([
        (
            "state".into(),
            dict([(
                PlainValue::Int(0),
                dict([("exp_avg".into(), tensor(1)), ("step".into(), 3.0.into())]),
            )]),
        ),
        (
            "param_groups".into(),
            PlainValue::List(vec![dict([
                ("lr".into(), 0.1.into()),
                ("params".into(), PlainValue::List(vec![PlainValue::Int(0)])),
            ])]),
        ),
    ])
}

#[test]
fn torch_files_keep_their_containers() {
    let parent = tempfile::tempdir().unwrap();
    let cases = [
        ("an optimizer", optimizer()),
        ("keys of every type", {
            let keys = [
                PlainValue::Int(-1),
                PlainValue::Bool(true),
                PlainValue::None,
                PlainValue::Float(0.5),
                PlainValue::Tuple(vec!["a".into(), PlainValue::Int(1)]),
                PlainValue::Bytes(vec![1]),
            ];
            PlainValue::Dict(keys.into_iter().map(|key| (key, tensor(2))).collect())
        }),
        (
            "an optimizer without state",
            dict([("state".into(), empty()), ("t".into(), tensor(3))]),
        ),
        (
            "nothing but an empty dict",
            dict([("sched".into(), empty())]),
        ),
        ("nothing", empty()),
        ("a list of nothing", PlainValue::List(Vec::new())),
        (
            "an empty dict in a list",
            PlainValue::List(vec![empty(), tensor(4), empty(), empty()]),
        ),
        (
            "an empty list in a list",
            dict([(
                "l".into(),
                PlainValue::List(vec![tensor(5), PlainValue::List(Vec::new())]),
            )]),
        ),
        (
            "a tuple of dicts",
            dict([(
                "t".into(),
                PlainValue::Tuple(vec![dict([("w".into(), tensor(6))]), 1.5.into()]),
            )]),
        ),
        (
            "a tuple at the root",
            PlainValue::Tuple(vec![dict([("w".into(), tensor(7))]), empty()]),
        ),
        ("one tensor", tensor(8)),
        (
            "types that a simpler value describes",
            PlainValue::Dict(typed()),
        ),
        ("such types as keys and in containers", {
            let all: Vec<PlainValue> = typed().into_iter().map(|(_, value)| value).collect();
            let key = PlainValue::typed(PythonType::DType, "torch.int8");
            dict([
                ("all".into(), PlainValue::Tuple(all)),
                ("keys".into(), dict([(key, tensor(9))])),
            ])
        }),
        ("keys of the same text", {
            let inner = |number| {
                dict([
                    ("w".into(), tensor(number)),
                    ("n".into(), PlainValue::Int(number.into())),
                ])
            };
            dict([(
                "s".into(),
                dict([
                    ("1".into(), inner(1)),
                    (PlainValue::Int(1), inner(2)),
                    ("2".into(), inner(3)),
                ]),
            )])
        }),
    ];
    for (name, value) in cases {
        let found = converted(&value, parent.path());
        assert!(found.same_bits(&value), "{name}: {found:?}");
    }
}

#[test]
fn a_view_keeps_the_containers_of_what_it_selects() {
    let parent = tempfile::tempdir().unwrap();
    let value = dict([
        (
            "model".into(),
            dict([("w".into(), tensor(1)), ("none".into(), empty())]),
        ),
        ("optimizer".into(), optimizer()),
        ("scheduler".into(), empty()),
    ]);
    let (from, to) = (parent.path().join("from.pt"), parent.path().join("to.pt"));
    std::fs::write(&from, encode_value(&value).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let selected = |select: &dyn Fn(&str) -> Rename| {
        let view = View::new(&*source, select, None).unwrap();
        let options = ConvertOptions {
            overwrite: true,
            ..ConvertOptions::default()
        };
        convert(&view, &to, OutputFormat::Torch, options).unwrap();
        decode_value(&std::fs::read(&to).unwrap()).unwrap()
    };
    let only_optimizer = |key: &str| {
        if key.starts_with("optimizer") {
            Rename::Keep
        } else {
            Rename::Drop
        }
    };
    assert_eq!(
        selected(&only_optimizer),
        dict([("optimizer".into(), optimizer())])
    );
    let renamed = |key: &str| match key {
        "model.w" => Rename::To("weight".to_owned()),
        "model.none" => Rename::Keep,
        _ => Rename::Drop,
    };
    // A renamed key keeps its place in the order.
    let expected = dict([
        ("weight".into(), tensor(1)),
        ("model".into(), dict([("none".into(), empty())])),
    ]);
    assert_eq!(selected(&renamed), expected);
    // Renaming a container takes all below it along, and a prefix is put before the outermost key.
    let moved = |key: &str| match key.strip_prefix("optimizer.") {
        Some(rest) => Rename::To(format!("optim.{rest}")),
        None => Rename::Drop,
    };
    assert_eq!(selected(&moved), dict([("optim".into(), optimizer())]));
    let prefixed = |key: &str| Rename::To(format!("run.{key}"));
    let model = dict([("w".into(), tensor(1)), ("none".into(), empty())]);
    let expected = dict([
        ("run.model".into(), model),
        ("run.optimizer".into(), optimizer()),
        ("run.scheduler".into(), empty()),
    ]);
    assert_eq!(selected(&prefixed), expected);
    let unwrapped = |key: &str| {
        key.strip_prefix("optimizer.")
            .map_or(Rename::Drop, |key| Rename::To(key.to_owned()))
    };
    assert_eq!(selected(&unwrapped), optimizer());
}

#[test]
fn keys_of_the_same_text_are_refused_where_only_text_is_kept() {
    let parent = tempfile::tempdir().unwrap();
    let value = dict([(
        "s".into(),
        dict([("1".into(), tensor(1)), (PlainValue::Int(1), tensor(2))]),
    )]);
    let from = parent.path().join("from.pt");
    std::fs::write(&from, encode_value(&value).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let keys: Vec<&str> = source.metadata().tensors().map(|(key, _)| key).collect();
    assert_eq!(keys, ["s.'1'", "s.1"]);
    let to = parent.path().join("to");
    for target in [
        OutputFormat::Dcp { ranks: 1 },
        OutputFormat::SafetensorsFile,
    ] {
        let error = convert(&*source, &to, target, ConvertOptions::default()).unwrap_err();
        let text = std::error::Error::source(&error).unwrap().to_string();
        assert!(text.contains("both keys 1 and \"1\""), "{text}");
        assert!(!to.exists());
    }
}

#[test]
fn a_type_that_a_simpler_value_describes_is_not_that_value() {
    let parent = tempfile::tempdir().unwrap();
    let written = |name: &str, value: PlainValue| {
        let path = parent.path().join(name);
        std::fs::write(&path, encode_value(&dict([("x".into(), value)])).unwrap()).unwrap();
        open(&path, OpenOptions::default()).unwrap()
    };
    for (_, value) in typed() {
        let (a, b) = (
            written("a.pt", value.clone()),
            written("b.pt", value.untyped().clone()),
        );
        let mut found = Vec::new();
        diff(&*a, &*b, DiffOptions::default(), &mut |key, difference| {
            found.push((key.to_owned(), difference))
        })
        .unwrap();
        assert!(
            matches!(&found[..], [(key, Difference::Value { .. })] if key == "x"),
            "{value:?}: {found:?}"
        );
        assert_ne!(
            digest(&*a, 1).unwrap().root(),
            digest(&*b, 1).unwrap().root(),
            "{value:?}"
        );
        // Every format keeps the type.
        for (number, target) in [
            OutputFormat::Torch,
            OutputFormat::Dcp { ranks: 2 },
            OutputFormat::SafetensorsFile,
        ]
        .into_iter()
        .enumerate()
        {
            let to = parent.path().join(number.to_string());
            convert(
                &*a,
                &to,
                target,
                ConvertOptions {
                    overwrite: true,
                    ..ConvertOptions::default()
                },
            )
            .unwrap();
            assert_eq!(
                open(&to, OpenOptions::default())
                    .unwrap()
                    .read_value("x")
                    .unwrap(),
                value
            );
        }
    }
}

#[test]
fn a_tuple_and_a_list_of_the_same_items_differ() {
    let parent = tempfile::tempdir().unwrap();
    let written = |name: &str, value: PlainValue| {
        let path = parent.path().join(name);
        std::fs::write(&path, encode_value(&dict([("x".into(), value)])).unwrap()).unwrap();
        open(&path, OpenOptions::default()).unwrap()
    };
    let items = vec![tensor(1), PlainValue::Int(2)];
    let tuple = written("tuple.pt", PlainValue::Tuple(items.clone()));
    let list = written("list.pt", PlainValue::List(items));
    for (a, b, first, second) in [
        (&tuple, &list, "a tuple of 2", "a list of 2"),
        (&list, &tuple, "a list of 2", "a tuple of 2"),
    ] {
        let mut found = Vec::new();
        diff(
            &**a,
            &**b,
            DiffOptions::default(),
            &mut |key, difference| found.push((key.to_owned(), difference)),
        )
        .unwrap();
        let container = Difference::Container {
            first: first.to_owned(),
            second: second.to_owned(),
        };
        assert_eq!(found, [("x".to_owned(), container)]);
    }
}

#[test]
fn a_difference_of_containers_is_a_difference() {
    let parent = tempfile::tempdir().unwrap();
    let written = |name: &str, value: &PlainValue| {
        let path = parent.path().join(name);
        std::fs::write(&path, encode_value(value).unwrap()).unwrap();
        open(&path, OpenOptions::default()).unwrap()
    };
    let of = |key: PlainValue| dict([("state".into(), dict([(key, tensor(1))]))]);
    for (name, first, second, key) in [
        (
            "a key's type",
            of(PlainValue::Int(0)),
            of("0".into()),
            "state",
        ),
        (
            "a tuple",
            dict([("t".into(), PlainValue::Tuple(vec![of("w".into())]))]),
            dict([("t".into(), PlainValue::List(vec![of("w".into())]))]),
            "t",
        ),
        (
            "an empty dict",
            dict([("a".into(), tensor(1)), ("b".into(), empty())]),
            dict([("a".into(), tensor(1))]),
            "b",
        ),
        (
            "an empty dict in a list",
            PlainValue::List(vec![tensor(1), empty()]),
            PlainValue::List(vec![tensor(1)]),
            "1",
        ),
    ] {
        let (a, b) = (written("a.pt", &first), written("b.pt", &second));
        let mut found = Vec::new();
        diff(&*a, &*b, DiffOptions::default(), &mut |key, difference| {
            found.push((key.to_owned(), difference))
        })
        .unwrap();
        assert!(found.iter().any(|(at, _)| at == key), "{name}: {found:?}");
        assert!(
            found
                .iter()
                .all(|(_, what)| !matches!(what, Difference::Elements { .. })),
            "{name}: {found:?}"
        );
    }
}

#[test]
fn a_checkpoint_equals_its_own_conversion() {
    let parent = tempfile::tempdir().unwrap();
    let groups = PlainValue::List(vec![dict([
        ("lr".into(), 0.1.into()),
        ("none".into(), empty()),
        (
            "betas".into(),
            PlainValue::Tuple(vec![0.9.into(), 0.95.into()]),
        ),
        ("params".into(), PlainValue::List(vec![PlainValue::Int(0)])),
    ])]);
    let mut state = State::default();
    state
        .tensors
        .insert("w".to_owned(), (DType::U8, vec![4], vec![7; 4]));
    // A dict and a list of dicts as one value, as torch 2.2 and Megatron-core write them.
    state
        .values
        .insert("optim.param_groups".to_owned(), groups.clone());
    state.values.insert(
        "rng".to_owned(),
        PlainValue::List(vec![dict([
            ("cpu".into(), tensor(1)),
            ("n".into(), PlainValue::Int(2)),
        ])]),
    );
    let whole = parent.path().join("whole");
    save(&state, 2, &whole, &Durable::new()).unwrap();
    let nested = parent.path().join("nested.pt");
    let value = dict([
        ("m".into(), dict([("w".into(), tensor(2))])),
        ("groups".into(), groups),
    ]);
    std::fs::write(&nested, encode_value(&value).unwrap()).unwrap();
    for from in [&whole, &nested] {
        let source = open(from, OpenOptions::default()).unwrap();
        for (number, target) in [
            OutputFormat::Torch,
            OutputFormat::Dcp { ranks: 2 },
            OutputFormat::SafetensorsFile,
            OutputFormat::SafetensorsDirectory { max_file_bytes: 10 },
            OutputFormat::SafetensorsShards { ranks: 2 },
        ]
        .into_iter()
        .enumerate()
        {
            let to = parent
                .path()
                .join(format!("{}-{number}", from.file_name().unwrap().display()));
            convert(&*source, &to, target, ConvertOptions::default()).unwrap();
            let converted = open(&to, OpenOptions::default()).unwrap();
            for (a, b) in [(&source, &converted), (&converted, &source)] {
                let mut found = Vec::new();
                let mut add = |key: &str, difference| found.push((key.to_owned(), difference));
                diff(&**a, &**b, DiffOptions::default(), &mut add).unwrap();
                assert_eq!(found, [], "{} as {target:?}", from.display());
            }
        }
    }
    // A difference in a part is still found.
    state.values.insert(
        "rng".to_owned(),
        PlainValue::List(vec![dict([
            ("cpu".into(), tensor(9)),
            ("n".into(), PlainValue::Int(3)),
        ])]),
    );
    let other = parent.path().join("other");
    save(&state, 1, &other, &Durable::new()).unwrap();
    let source = open(&other, OpenOptions::default()).unwrap();
    let converted = open(parent.path().join("whole-0"), OpenOptions::default()).unwrap();
    let mut found = Vec::new();
    diff(
        &*source,
        &*converted,
        DiffOptions::default(),
        &mut |key, _| found.push(key.to_owned()),
    )
    .unwrap();
    assert_eq!(found, ["rng.0.cpu", "rng.0.n"]);
}

/// The paths of keys are in the header: without values there is no file of values.
#[test]
fn nested_keys_without_values_need_no_values_file() {
    let parent = tempfile::tempdir().unwrap();
    let from = parent.path().join("from.pt");
    let value = dict([(
        "model".into(),
        dict([("a.w".into(), tensor(1)), ("b".into(), tensor(2))]),
    )]);
    std::fs::write(&from, encode_value(&value).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    for (name, target) in [
        ("one.safetensors", OutputFormat::SafetensorsFile),
        (
            "hf",
            OutputFormat::SafetensorsDirectory { max_file_bytes: 2 },
        ),
        ("shards", OutputFormat::SafetensorsShards { ranks: 2 }),
    ] {
        let to = parent.path().join(name);
        let done = convert(&*source, &to, target, ConvertOptions::default()).unwrap();
        assert_eq!((done.aside, done.aside_file), (Vec::new(), None));
        assert!(
            !to.join("values.json").exists() && !parent.path().join("one.values.json").exists()
        );
        let back = parent.path().join(format!("{name}.pt"));
        convert(
            &*open(&to, OpenOptions::default()).unwrap(),
            &back,
            OutputFormat::Torch,
            ConvertOptions::default(),
        )
        .unwrap();
        assert_eq!(
            decode_value(&std::fs::read(&back).unwrap()).unwrap(),
            value,
            "{name}"
        );
    }
}

#[test]
fn tensors_inside_a_value_stay_apart_where_their_paths_are_the_same() {
    let parent = tempfile::tempdir().unwrap();
    let inside = dict([
        (1i64.into(), tensor(1)),
        ("1".into(), tensor(2)),
        ("a.b".into(), tensor(3)),
        ("a".into(), dict([("b".into(), tensor(4))])),
    ]);
    let value = PlainValue::Set(vec![PlainValue::Tuple(vec![inside])]);
    // A tensor and a value of their own have the keys of tensors inside the value.
    let state = dict([
        ("x".into(), value.clone()),
        ("x.0.0.1".into(), tensor(5)),
        ("x.0.0.a.b".into(), "text".into()),
    ]);
    let from = parent.path().join("from.pt");
    std::fs::write(&from, encode_value(&state).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    for (number, target) in [
        OutputFormat::SafetensorsFile,
        OutputFormat::SafetensorsShards { ranks: 2 },
    ]
    .into_iter()
    .enumerate()
    {
        let to = parent.path().join(number.to_string());
        convert(&*source, &to, target, ConvertOptions::default()).unwrap();
        let written = open(&to, OpenOptions::default()).unwrap();
        assert_eq!(written.read_value("x").unwrap(), value, "{target:?}");
        assert_eq!(written.metadata().entries.len(), 3);
        assert!(
            verify(&*written, Level::Deep, VerifyOptions::default())
                .unwrap()
                .is_ok()
        );
    }
}

#[test]
fn bytes_of_no_length_are_bytes() {
    // `torch.save({'b': b''})`: protocol 2 calls `bytes` for them.
    let pickle = b"\x80\x02}q\x00X\x01\x00\x00\x00bq\x01c__builtin__\nbytes\nq\x02)Rq\x03s.";
    let parsed = fsdp_formats::internals::parse(pickle).unwrap();
    let value = fsdp_formats::internals::value_of(&parsed, parsed.root()).unwrap();
    assert_eq!(value, dict([("b".into(), PlainValue::Bytes(Vec::new()))]));
}

#[test]
fn a_dict_with_a_number_and_its_text_as_keys_is_equal_to_itself() {
    let parent = tempfile::tempdir().unwrap();
    let path = parent.path().join("state.pt");
    for keys in [["1".into(), 1i64.into()], [1i64.into(), "1".into()]] {
        let [first, second]: [PlainValue; 2] = keys;
        std::fs::write(
            &path,
            encode_value(&dict([(first, tensor(1)), (second, tensor(2))])).unwrap(),
        )
        .unwrap();
        let [a, b] = [(); 2].map(|()| open(&path, OpenOptions::default()).unwrap());
        let mut found = Vec::new();
        diff(&*a, &*b, DiffOptions::default(), &mut |key, difference| {
            found.push((key.to_owned(), difference))
        })
        .unwrap();
        assert_eq!(found, []);
    }
}

#[test]
fn a_value_that_is_too_deep_for_a_format_is_named() {
    let parent = tempfile::tempdir().unwrap();
    let deep = (0..60).fold(PlainValue::None, |inner, _| PlainValue::List(vec![inner]));
    let from = parent.path().join("from.pt");
    std::fs::write(
        &from,
        encode_value(&dict([("a".into(), 1i64.into()), ("b".into(), deep)])).unwrap(),
    )
    .unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let refused = convert(
        &*source,
        parent.path().join("to"),
        OutputFormat::SafetensorsFile,
        ConvertOptions::default(),
    );
    let Err(FileError::Encode { fqn, .. }) = refused else {
        panic!("{refused:?}")
    };
    assert_eq!(fqn, "b");
}
