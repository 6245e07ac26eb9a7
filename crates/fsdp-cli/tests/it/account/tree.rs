//! Random state dicts: a model with layers, its optimizer, and anything else.

use std::collections::BTreeMap;

use fsdp_layout::{DType, PlainTensor, PlainValue};

/// Numbers that look random, and are the same for the same seed.
pub(super) struct Random(pub(super) u64);

impl Random {
    /// Returns a number below `end`.
    pub(super) fn below(&mut self, end: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % end
    }

    pub(super) fn choose<T: Clone>(&mut self, choices: &[T]) -> T {
        choices[self.below(choices.len())].clone()
    }

    /// Returns `true` once in so many calls.
    pub(super) fn chance(&mut self, one_in: usize) -> bool {
        self.below(one_in) == 0
    }
}

pub(super) const CASTABLE: [DType; 4] = [DType::F64, DType::F32, DType::F16, DType::BF16];

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

pub(super) fn dict(items: Vec<(&str, PlainValue)>) -> PlainValue {
    let items = items.into_iter().map(|(key, value)| (key.into(), value));
    PlainValue::Dict(items.collect())
}

/// Returns a tensor of random elements: small, large, infinite, and not a number.
pub(super) fn tensor_of(random: &mut Random, dtype: DType, shape: &[usize]) -> PlainValue {
    const NUMBERS: [f64; 11] = [
        0.0,
        1.5,
        -2.25,
        70000.0,
        -1e30,
        1e300,
        f64::INFINITY,
        f64::NAN,
        3e-6,
        -1e-20,
        1e-300,
    ];
    let mut data = Vec::new();
    for _ in 0..shape.iter().product::<usize>() {
        let number = random.choose(&NUMBERS);
        match dtype {
            DType::F64 => data.extend(number.to_le_bytes()),
            DType::F32 => data.extend((number as f32).to_le_bytes()),
            DType::F16 => data.extend(half::f16::from_f64(number).to_le_bytes()),
            DType::BF16 => data.extend(half::bf16::from_f64(number).to_le_bytes()),
            _ => {
                let end = if dtype == DType::Bool { 2 } else { 120 };
                data.extend((0..dtype.size_in_bytes()).map(|_| random.below(end) as u8));
            }
        }
    }
    PlainValue::Tensor(PlainTensor {
        dtype,
        shape: shape.to_vec(),
        data,
    })
}

fn random_tensor(random: &mut Random) -> PlainValue {
    let dtype = random.choose(&DTYPES);
    let shape = random.choose(&[&[][..], &[1], &[3], &[2, 3], &[0, 2], &[5, 1, 2]]);
    tensor_of(random, dtype, shape)
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

/// The number of layers of the model.
pub(super) const LAYERS: usize = 2;

/// Returns a model of layers with two matrices, a bias, experts and a norm each, an embedding, and
/// a weight of 8 bits with its scale.
fn random_model(random: &mut Random) -> PlainValue {
    let dtype = random.choose(&CASTABLE);
    let mut items: Vec<(String, PlainValue)> = Vec::new();
    for layer in 0..LAYERS {
        for (name, shape) in [
            ("w1.weight", &[4, 6][..]),
            ("w2.weight", &[4, 6]),
            ("bias", &[4]),
            ("experts", &[3, 2, 4]),
            ("norm.weight", &[4]),
        ] {
            let key = format!("layers.{layer}.{name}");
            items.push((key, tensor_of(random, dtype, shape)));
        }
    }
    items.push(("embed.weight".to_owned(), tensor_of(random, dtype, &[8, 4])));
    let code = tensor_of(random, DType::F8E4M3Fn, &[4, 6]);
    items.push(("packed.weight".to_owned(), code));
    let scale_shape = random.choose(&[&[][..], &[4, 1], &[4], &[2, 3]]);
    let scale_dtype = random.choose(&[DType::F32, DType::BF16]);
    let scale = tensor_of(random, scale_dtype, scale_shape);
    items.push(("packed.weight_scale".to_owned(), scale));
    items.push((
        "packed.input_scale".to_owned(),
        tensor_of(random, DType::F32, &[]),
    ));
    let items = items.iter().map(|(key, item)| (&**key, item.clone()));
    dict(items.collect())
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
            let step = PlainValue::Tensor(PlainTensor {
                dtype: DType::F32,
                shape: Vec::new(),
                data: 1001f32.to_le_bytes().into(),
            });
            let moment = random_tensor(random);
            state.push((key, dict(vec![("exp_avg", moment), ("step", step)])));
        }
    }
    let lr = match random.chance(2) {
        true => tensor_of(random, DType::F32, &[]),
        false => PlainValue::Float(0.0025),
    };
    let group = dict(vec![("lr", lr), ("params", PlainValue::List(params))]);
    dict(vec![
        ("state", PlainValue::Dict(state)),
        ("param_groups", PlainValue::List(vec![group])),
    ])
}

/// Returns the state of a training.
pub(super) fn random_state(random: &mut Random) -> PlainValue {
    let names: Vec<String> = (0..LAYERS)
        .map(|layer| format!("layers.{layer}.w1.weight"))
        .collect();
    dict(vec![
        ("model", random_model(random)),
        ("other", random_dict(random, 2)),
        ("optim", random_optimizer(random, &names)),
    ])
}

/// Returns the same state with other elements.
pub(super) fn with_other_elements(random: &mut Random, state: &PlainValue) -> PlainValue {
    match state {
        PlainValue::Tensor(tensor) => tensor_of(random, tensor.dtype, &tensor.shape),
        PlainValue::Dict(items) => PlainValue::Dict(
            items
                .iter()
                .map(|(key, item)| (key.clone(), with_other_elements(random, item)))
                .collect(),
        ),
        PlainValue::List(items) => PlainValue::List(
            items
                .iter()
                .map(|item| with_other_elements(random, item))
                .collect(),
        ),
        other => other.clone(),
    }
}
