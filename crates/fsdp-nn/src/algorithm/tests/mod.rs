//! Tests: the arithmetic against torch's results, and everything about param groups, schema and
//! refusals.

mod schema;
mod torch;

use serde_json::Value;

use super::*;

/// Returns the results of torch 2.15, and of schedulefree 1.4.1, made by `algorithm.py` beside it.
fn goldens() -> Value {
    serde_json::from_str(include_str!("../../../tests/data/algorithm.json")).unwrap()
}

/// The optimizer of this class with torch's defaults.
fn default(class: &str) -> Algorithm {
    match class {
        "SGD" => Algorithm::Sgd(SgdOptions::default()),
        "Adam" => Algorithm::Adam(AdamOptions::default()),
        "AdamW" => Algorithm::AdamW(AdamOptions::adamw()),
        "Adagrad" => Algorithm::Adagrad(AdagradOptions::default()),
        "Adafactor" => Algorithm::Adafactor(AdafactorOptions::default()),
        "Muon" => Algorithm::Muon(MuonOptions::default()),
        "AdamWScheduleFree" => Algorithm::ScheduleFreeAdamW(ScheduleFreeOptions::default()),
        class => panic!("no optimizer {class}"),
    }
}

/// The optimizer that a torch call with these keyword arguments makes.
fn with_options(class: &str, options: &Value) -> Algorithm {
    let mut group = default(class).to_group();
    for (key, value) in options.as_object().unwrap() {
        let (_, default) = group.iter_mut().find(|(name, _)| name == key).unwrap();
        *default = plain(value);
    }
    let read = default(class).with_group(&group).unwrap();
    assert_eq!(read.unknown, []);
    read.algorithm
}

fn plain(value: &Value) -> PlainValue {
    match value {
        Value::Null => PlainValue::None,
        Value::Bool(value) => PlainValue::Bool(*value),
        Value::String(value) => PlainValue::from(value.clone()),
        Value::Array(items) => PlainValue::List(items.iter().map(plain).collect()),
        value => value.as_i64().map_or_else(
            || PlainValue::Float(value.as_f64().unwrap()),
            PlainValue::Int,
        ),
    }
}
