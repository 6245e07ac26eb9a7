//! Conversions keep the nested containers of a state dict: the types of keys, tuples, and what is empty.

use std::path::Path;

use fsdp_dcp::checkpoint::open;
use fsdp_dcp::convert::{ConvertOptions, OutputFormat, Rename, View, convert};
use fsdp_dcp::diff::{Difference, Tolerance, diff};
use fsdp_dcp::internals::{decode_value, encode_value};
use fsdp_dcp::reader::OpenOptions;
use fsdp_layout::{DType, PlainTensor, PlainValue};

fn tensor(value: u8) -> PlainValue {
    PlainValue::Tensor(PlainTensor { dtype: DType::U8, shape: vec![2], data: vec![value; 2] })
}

fn dict<const N: usize>(entries: [(PlainValue, PlainValue); N]) -> PlainValue {
    PlainValue::Dict(entries.into())
}

fn empty() -> PlainValue {
    PlainValue::Dict(Vec::new())
}

/// Writes a value as `torch.save` does, and returns what a conversion to the same format makes of it.
fn converted(value: &PlainValue, parent: &Path) -> PlainValue {
    let (from, to) = (parent.join("from.pt"), parent.join("to.pt"));
    std::fs::write(&from, encode_value(value).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let options = ConvertOptions { overwrite: true, ..ConvertOptions::default() };
    convert(&*source, &to, OutputFormat::Torch, options).unwrap();
    decode_value(&std::fs::read(&to).unwrap()).unwrap()
}

/// The state of an optimizer, whose keys are numbers.
fn optimizer() -> PlainValue {
    dict([
        (
            "state".into(),
            dict([(PlainValue::Int(0), dict([("exp_avg".into(), tensor(1)), ("step".into(), 3.0.into())]))]),
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
        ("an optimizer without state", dict([("state".into(), empty()), ("t".into(), tensor(3))])),
        ("nothing but an empty dict", dict([("sched".into(), empty())])),
        ("nothing", empty()),
        ("a list of nothing", PlainValue::List(Vec::new())),
        ("an empty dict in a list", PlainValue::List(vec![empty(), tensor(4), empty(), empty()])),
        (
            "an empty list in a list",
            dict([("l".into(), PlainValue::List(vec![tensor(5), PlainValue::List(Vec::new())]))]),
        ),
        (
            "a tuple of dicts",
            dict([("t".into(), PlainValue::Tuple(vec![dict([("w".into(), tensor(6))]), 1.5.into()]))]),
        ),
        ("a tuple at the root", PlainValue::Tuple(vec![dict([("w".into(), tensor(7))]), empty()])),
        ("one tensor", tensor(8)),
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
        ("model".into(), dict([("w".into(), tensor(1)), ("none".into(), empty())])),
        ("optimizer".into(), optimizer()),
        ("scheduler".into(), empty()),
    ]);
    let (from, to) = (parent.path().join("from.pt"), parent.path().join("to.pt"));
    std::fs::write(&from, encode_value(&value).unwrap()).unwrap();
    let source = open(&from, OpenOptions::default()).unwrap();
    let selected = |select: &dyn Fn(&str) -> Rename| {
        let view = View::new(&*source, select, None).unwrap();
        let options = ConvertOptions { overwrite: true, ..ConvertOptions::default() };
        convert(&view, &to, OutputFormat::Torch, options).unwrap();
        decode_value(&std::fs::read(&to).unwrap()).unwrap()
    };
    let only_optimizer = |key: &str| if key.starts_with("optimizer") { Rename::Keep } else { Rename::Drop };
    assert_eq!(selected(&only_optimizer), dict([("optimizer".into(), optimizer())]));
    let renamed = |key: &str| match key {
        "model.w" => Rename::To("weight".to_owned()),
        "model.none" => Rename::Keep,
        _ => Rename::Drop,
    };
    let expected = dict([("model".into(), dict([("none".into(), empty())])), ("weight".into(), tensor(1))]);
    assert_eq!(selected(&renamed), expected);
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
        ("a key's type", of(PlainValue::Int(0)), of("0".into()), "state"),
        (
            "a tuple",
            dict([("t".into(), PlainValue::Tuple(vec![of("w".into())]))]),
            dict([("t".into(), PlainValue::List(vec![of("w".into())]))]),
            "t",
        ),
        ("an empty dict", dict([("a".into(), tensor(1)), ("b".into(), empty())]), dict([("a".into(), tensor(1))]), "b"),
        ("an empty dict in a list", PlainValue::List(vec![tensor(1), empty()]), PlainValue::List(vec![tensor(1)]), "1"),
    ] {
        let (a, b) = (written("a.pt", &first), written("b.pt", &second));
        let mut found = Vec::new();
        diff(&*a, &*b, Tolerance::default(), &mut |key, difference| found.push((key.to_owned(), difference))).unwrap();
        assert!(found.iter().any(|(at, _)| at == key), "{name}: {found:?}");
        assert!(found.iter().all(|(_, what)| !matches!(what, Difference::Elements { .. })), "{name}: {found:?}");
    }
}
