//! The account of a conversion: for random state dicts and options, what went in is what came out
//! and what was told.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_formats::checkpoint::{Change, Checkpoint};
use fsdp_layout::{DType, PlainValue};
use fsdp_tools::convert::{Cast, ConvertOptions, Converted, Rename, View, convert};
use fsdp_tools::elements::for_each_number;
use proptest::prelude::*;
use tempfile::TempDir;

use crate::changes::{TARGETS, bytes_of, dict, opened, tensor, told, write};

/// Numbers that look random, and are the same for the same seed.
struct Random(u64);

impl Random {
    /// Returns a number below `end`.
    fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }

    fn choose<T: Copy>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())]
    }

    fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

const DTYPES: [DType; 12] = [
    DType::F32,
    DType::F32,
    DType::F64,
    DType::F16,
    DType::BF16,
    DType::I64,
    DType::U8,
    DType::Bool,
    DType::F8E4M3Fn,
    DType::F8E5M2,
    DType::Complex64,
    DType::I32,
];

const NAMES: [&str; 12] = [
    "weight",
    "bias",
    "norm",
    "step",
    "lr",
    "weight_scale",
    "scale",
    "num_steps",
    "wte",
    "h",
    "0",
    "exp_avg",
];

/// Returns a tensor of random elements: small, large, infinite, and not a number.
fn random_tensor(random: &mut Random) -> PlainValue {
    let dtype = random.choose(&DTYPES);
    let shape: &[usize] = random.choose(&[&[][..], &[1], &[3], &[2, 3], &[0, 2], &[5, 1, 2]]);
    let count = shape.iter().product::<usize>();
    let mut data = Vec::new();
    for _ in 0..count {
        let number = random.choose(&[
            0.0,
            1.5,
            -2.25,
            70000.0,
            -1e30,
            1e300,
            f64::INFINITY,
            f64::NAN,
            3e-6,
        ]);
        match dtype {
            DType::F64 => data.extend(number.to_le_bytes()),
            DType::F32 => data.extend((number as f32).to_le_bytes()),
            DType::F16 => data.extend(half::f16::from_f64(number).to_le_bytes()),
            DType::BF16 => data.extend(half::bf16::from_f64(number).to_le_bytes()),
            _ => data.extend(
                (0..dtype.size_in_bytes())
                    .map(|_| random.below(if dtype == DType::Bool { 2 } else { 120 }) as u8),
            ),
        }
    }
    tensor(dtype, shape, data)
}

/// Returns a value that is no tensor.
fn random_value(random: &mut Random) -> PlainValue {
    match random.below(8) {
        0 => PlainValue::None,
        1 => PlainValue::Int(-7),
        2 => PlainValue::Float(f64::NAN),
        3 => "text".into(),
        4 => PlainValue::Tuple(vec![PlainValue::Float(0.9), PlainValue::Float(0.95)]),
        5 => PlainValue::List(vec![PlainValue::Int(1), "two".into()]),
        6 => PlainValue::Bool(true),
        _ => PlainValue::Bytes(vec![0, 255]),
    }
}

/// Returns a nested dict of tensors and values.
fn random_dict(random: &mut Random, depth: usize) -> PlainValue {
    let mut items: BTreeMap<&str, PlainValue> = BTreeMap::new();
    for _ in 0..1 + random.below(5) {
        let item = match random.below(if depth == 0 { 5 } else { 8 }) {
            0 => random_value(random),
            1..5 => random_tensor(random),
            5 => PlainValue::List(vec![random_tensor(random), random_dict(random, depth - 1)]),
            _ => random_dict(random, depth - 1),
        };
        items.insert(random.choose(&NAMES), item);
    }
    dict(items.into_iter().collect())
}

/// Returns an optimizer of the parameters with these names, or of their numbers.
fn random_optimizer(random: &mut Random, names: &[String]) -> PlainValue {
    let has_names = random.chance(2);
    let (mut state, mut params) = (Vec::new(), Vec::new());
    for (number, name) in names.iter().enumerate() {
        let key: PlainValue = match has_names {
            true => name.as_str().into(),
            false => PlainValue::Int(number as i64),
        };
        params.push(key.clone());
        if random.chance(2) {
            let step = tensor(DType::F32, &[], 1001f32.to_le_bytes().into());
            state.push((
                key,
                dict(vec![("exp_avg", random_tensor(random)), ("step", step)]),
            ));
        }
    }
    let lr = match random.chance(2) {
        true => tensor(DType::F32, &[], 0.0025f32.to_le_bytes().into()),
        false => PlainValue::Float(0.0025),
    };
    let group = dict(vec![("lr", lr), ("params", PlainValue::List(params))]);
    dict(vec![
        ("state", PlainValue::Dict(state)),
        ("param_groups", PlainValue::List(vec![group])),
    ])
}

/// Returns the numbers that elements are.
fn numbers(dtype: DType, bytes: &[u8]) -> Vec<f64> {
    let mut numbers = Vec::new();
    for_each_number(dtype, bytes, &mut |number| numbers.push(number));
    numbers
}

/// Returns a number as `dtype` has it.
fn rounded(number: f64, dtype: DType) -> f64 {
    match dtype {
        DType::F16 => half::f16::from_f32(number as f32).to_f64(),
        DType::BF16 => half::bf16::from_f32(number as f32).to_f64(),
        DType::F32 => f64::from(number as f32),
        _ => number,
    }
}

/// Checks a tensor that came out of a conversion against the one that went in. Returns the number
/// of elements that became infinite.
fn check_tensor(
    input: (DType, Vec<u8>),
    output: (DType, Vec<u8>),
    is_in_optimizer: bool,
    cast: Option<Cast>,
    kept: &BTreeSet<String>,
    key: &str,
) -> usize {
    const CASTABLE: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];
    if input.0 == output.0 {
        assert_eq!(input.1, output.1, "{key}");
        // A number that stays though all are cast is told, unless it is an optimizer's.
        if let Some(cast) = cast
            && input.0 != cast.dtype
            && (CASTABLE.contains(&input.0) || input.0.is_float() || input.0 == DType::Complex64)
        {
            let is_told = kept
                .iter()
                .any(|name| name == key || name.starts_with(&format!("{key}: ")));
            let is_asked_for = is_in_optimizer && !cast.with_optimizer;
            assert!(
                is_told != is_asked_for,
                "{key} of {} was not cast: {kept:?}",
                input.0
            );
        }
        return 0;
    }
    let cast = cast.unwrap();
    assert!(
        CASTABLE.contains(&input.0) && output.0 == cast.dtype,
        "{key}"
    );
    assert!(
        cast.with_optimizer || !is_in_optimizer,
        "{key} is an optimizer's"
    );
    let is_hyperparameter = ["step", "lr", "num_steps"]
        .iter()
        .any(|name| key.ends_with(&format!(".{name}")) && (is_in_optimizer || *name == "step"));
    assert!(!is_hyperparameter, "{key} was cast");
    let mut infinite = 0;
    for (before, after) in numbers(input.0, &input.1)
        .into_iter()
        .zip(numbers(output.0, &output.1))
    {
        let expected = rounded(before, cast.dtype);
        assert!(
            expected == after || expected.is_nan() && after.is_nan(),
            "{key}: {before} {after}"
        );
        infinite += usize::from(after.is_infinite() && before.is_finite());
    }
    infinite
}

/// Checks a conversion of `source` by `rename` and `cast` to `written`.
fn check_account(
    source: &dyn Checkpoint,
    written: &dyn Checkpoint,
    rename: &dyn Fn(&str) -> Rename,
    cast: Option<Cast>,
    report: &Converted,
) {
    let kept: BTreeSet<String> = told(&report.changes, "kept the dtype")
        .into_iter()
        .collect();
    let overflowed = told(&report.changes, "infinite");
    let renamed = told(&report.changes, "new names of parameters");
    let mut expected_keys = BTreeSet::new();
    let mut expected_overflows = BTreeSet::new();
    for (fqn, _) in &source.metadata().entries {
        let key = match rename(fqn) {
            Rename::Drop => continue,
            Rename::Keep => fqn.clone(),
            Rename::To(key) => key,
        };
        expected_keys.insert(key.clone());
        if source.metadata().tensor(fqn).is_some() {
            let shapes = [source, written].map(|checkpoint| {
                let name = if std::ptr::eq(checkpoint, source) {
                    fqn
                } else {
                    &key
                };
                checkpoint
                    .metadata()
                    .tensor(name)
                    .map(|tensor| tensor.shape.clone())
            });
            assert_eq!(shapes[0], shapes[1], "{key}");
            let is_in_optimizer = fqn.starts_with("optim.");
            let infinite = check_tensor(
                bytes_of(source, fqn),
                bytes_of(written, &key),
                is_in_optimizer,
                cast,
                &kept,
                &key,
            );
            if infinite > 0 {
                expected_overflows.insert(format!("{key}: {infinite}"));
            }
        } else {
            let [before, after] = [
                source.read_value(fqn).unwrap(),
                written.read_value(&key).unwrap(),
            ];
            let is_told = renamed.contains(fqn) || renamed.contains(&key);
            assert!(
                before.same_bits(&after) != is_told,
                "{key}: {before:?} {after:?}"
            );
        }
    }
    let keys: BTreeSet<String> = written.metadata().entries.keys().cloned().collect();
    assert_eq!(keys, expected_keys);
    assert_eq!(
        overflowed.into_iter().collect::<BTreeSet<_>>(),
        expected_overflows
    );
    // Keys of other types than text are told where they become text.
    let has_integer_keys = |checkpoint: &dyn Checkpoint| {
        checkpoint.structure().is_some_and(|structure| {
            structure
                .describe_untold()
                .iter()
                .any(|place| place.contains("type int"))
        })
    };
    if !written.metadata().entries.is_empty() && has_integer_keys(source) {
        let is_told = report
            .containers
            .iter()
            .any(|place| place.contains("type int"));
        let is_kept = has_integer_keys(written);
        let is_left_out = !expected_keys.iter().any(|key| key.contains("state."));
        assert!(is_told || is_kept || is_left_out, "{:?}", report.containers);
    }
}

/// Returns what a change is about, for a message.
fn lines(changes: &[Change]) -> Vec<String> {
    changes.iter().map(Change::line).collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 40, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_went_in_is_what_came_out_and_what_was_told(seed in any::<u64>()) {
        let random = &mut Random(seed);
        let parent = TempDir::new().unwrap();
        let model = random_dict(random, 2);
        let names: Vec<String> = (0..3).map(|number| format!("layer.{number}.w")).collect();
        let mut parameters = Vec::new();
        for name in &names {
            parameters.push((name.as_str(), random_tensor(random)));
        }
        let state = dict(vec![
            ("model", dict(parameters.clone())),
            ("other", model),
            ("optim", random_optimizer(random, &names)),
        ]);
        let source = opened(&write(&parent, &state));
        let dropped = random.below(9);
        let is_renamed = random.chance(2);
        let rename = |key: &str| {
            if key.len() % 9 == dropped && key.starts_with("other.") {
                return Rename::Drop;
            }
            for start in ["model.layer.", "optim.state.layer."] {
                if is_renamed && let Some(rest) = key.strip_prefix(start) {
                    return Rename::To(format!("{}block.{rest}", &start[..start.len() - "layer.".len()]));
                }
            }
            Rename::Keep
        };
        let cast = match random.below(5) {
            0 => None,
            number => Some(Cast {
                dtype: [DType::F64, DType::F32, DType::F16, DType::BF16][number - 1],
                with_optimizer: random.chance(2),
            }),
        };
        for (number, target) in TARGETS.into_iter().enumerate() {
            let path = parent.path().join(number.to_string());
            let view = View::new(&*source, rename, cast).unwrap();
            let report = convert(&view, &path, target, ConvertOptions::default()).unwrap();
            let written = opened(&path);
            println!("{target:?}: {:?}", lines(&report.changes));
            check_account(&*source, &*written, &rename, cast, &report);
        }
    }
}
