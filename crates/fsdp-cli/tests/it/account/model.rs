//! The model of what comes out of a conversion, and of what is told about it: each option as a few
//! lines over a flat state.

use std::collections::{BTreeMap, BTreeSet};

use fsdp_layout::{DType, PlainTensor, PlainValue};
use fsdp_tools::elements::for_each_number;

use super::tree::{CASTABLE, LAYERS, Random};

/// All tensors and values of a checkpoint, by their keys.
pub(super) type State = BTreeMap<String, PlainValue>;

/// A kind of line that tells a change, by a part of its text.
pub(super) type Line = &'static str;

pub(super) const KEPT: Line = "kept the dtype";
pub(super) const INFINITE: Line = "got infinite elements";
pub(super) const ZERO: Line = "got zeros";
pub(super) const SPOILED: Line = "got NaN or infinite elements";
pub(super) const DEQUANTIZED: Line = "multiplied by its scale";
pub(super) const ACTIVATIONS: Line = "of activations";
pub(super) const UNMATCHED: Line = "matched no rule of the map";
pub(super) const FROM_FIRST: Line = "came from the first checkpoint";

/// All kinds of lines.
pub(super) const LINES: [Line; 8] = [
    KEPT,
    INFINITE,
    ZERO,
    SPOILED,
    DEQUANTIZED,
    ACTIVATIONS,
    UNMATCHED,
    FROM_FIRST,
];

/// A state on its way through a conversion, and the names in the lines that tell what became of it.
#[derive(Clone, Default)]
pub(super) struct Account {
    pub(super) state: State,
    pub(super) told: BTreeMap<Line, BTreeSet<String>>,
}

impl Account {
    pub(super) fn tell(&mut self, line: Line, name: impl Into<String>) {
        self.told.entry(line).or_default().insert(name.into());
    }

    /// Tells how many elements were lost, if some were.
    pub(super) fn tell_lost(&mut self, key: &str, lost: Lost) {
        for (line, count) in [
            (INFINITE, lost.infinite),
            (ZERO, lost.zero),
            (SPOILED, lost.spoiled),
        ] {
            if count > 0 {
                self.tell(line, format!("{key}: {count}"));
            }
        }
    }

    pub(super) fn has(&self, key: &str) -> bool {
        self.state.contains_key(key)
    }

    /// Takes a tensor out of the state.
    fn take(&mut self, key: &str) -> PlainTensor {
        match self.state.remove(key) {
            Some(PlainValue::Tensor(tensor)) => tensor,
            other => panic!("no tensor `{key}`: {other:?}"),
        }
    }

    fn put(&mut self, key: impl Into<String>, tensor: PlainTensor) {
        self.state.insert(key.into(), PlainValue::Tensor(tensor));
    }
}

/// The numbers of elements that became infinite, or zero, or NaN or infinite because of others.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Lost {
    pub(super) infinite: usize,
    pub(super) zero: usize,
    pub(super) spoiled: usize,
}

impl Lost {
    /// Counts an element that was `before`, and is `after`.
    pub(super) fn count(&mut self, before: f64, after: f64) {
        self.infinite += usize::from(before.is_finite() && after.is_infinite());
        self.zero += usize::from(before != 0.0 && after == 0.0);
    }
}

/// Returns the numbers that elements are.
pub(super) fn numbers(tensor: &PlainTensor) -> Vec<f64> {
    // A complex number is two numbers.
    let dtype = match tensor.dtype {
        DType::Complex64 => DType::F32,
        dtype => dtype,
    };
    let mut numbers = Vec::new();
    for_each_number(dtype, &tensor.data, &mut |number| numbers.push(number));
    numbers
}

/// Returns numbers as elements of `dtype`, rounded as torch does: through `f32`.
fn encoded(dtype: DType, numbers: &[f64]) -> Vec<u8> {
    let mut data = Vec::new();
    for &number in numbers {
        match dtype {
            DType::F64 => data.extend(number.to_le_bytes()),
            DType::F32 => data.extend((number as f32).to_le_bytes()),
            DType::F16 => data.extend(half::f16::from_f32(number as f32).to_le_bytes()),
            _ => data.extend(half::bf16::from_f32(number as f32).to_le_bytes()),
        }
    }
    data
}

/// `--exclude`, `--include`, `--rename` and `--prefix`.
#[derive(Default)]
pub(super) struct Selection {
    pub(super) excluded: BTreeSet<String>,
    /// The keys begin with this.
    pub(super) included: &'static str,
    pub(super) renames: Vec<(&'static str, &'static str)>,
    pub(super) prefix: &'static str,
}

impl Selection {
    pub(super) fn random(random: &mut Random, state: &State) -> Self {
        let mut selection = Selection::default();
        for key in state.keys().filter(|key| key.starts_with("other.")) {
            if random.chance(5) {
                selection.excluded.insert(key.clone());
            }
        }
        if random.chance(6) {
            selection.included = "model.";
        }
        let in_model = ("model.layers", "model.blocks");
        let in_optimizer = ("optim.state.layers", "optim.state.blocks");
        selection.renames = random.choose(&[
            vec![],
            vec![in_model, in_optimizer],
            vec![in_model],
            vec![("model.", "")],
        ]);
        // A rule that fits no key is an error.
        selection.renames.retain(|(old, _)| {
            state.keys().any(|key| {
                key.starts_with(old)
                    && key.starts_with(selection.included)
                    && !selection.excluded.contains(key)
            })
        });
        selection.prefix = random.choose(&["", "", "p."]);
        selection
    }

    pub(super) fn arguments(&self) -> Vec<String> {
        let mut arguments = Vec::new();
        for key in &self.excluded {
            arguments.extend(["--exclude".to_owned(), key.clone()]);
        }
        if !self.included.is_empty() {
            arguments.extend(["--include".to_owned(), format!("{}*", self.included)]);
        }
        for (old, new) in &self.renames {
            arguments.extend(["--rename".to_owned(), format!("{old}={new}")]);
        }
        if !self.prefix.is_empty() {
            arguments.extend(["--prefix".to_owned(), self.prefix.to_owned()]);
        }
        arguments
    }

    /// Returns the new key; `None` for one that is left out.
    pub(super) fn new_key(&self, key: &str) -> Option<String> {
        if self.excluded.contains(key) || !key.starts_with(self.included) {
            return None;
        }
        let renamed = self
            .renames
            .iter()
            .find_map(|(old, new)| key.strip_prefix(old).map(|suffix| format!("{new}{suffix}")));
        let key = renamed.unwrap_or_else(|| key.to_owned());
        Some(format!("{}{key}", self.prefix))
    }

    pub(super) fn apply(&self, account: &mut Account) {
        let state = std::mem::take(&mut account.state);
        for (key, item) in state {
            if let Some(key) = self.new_key(&key) {
                account.state.insert(key, item);
            }
        }
    }
}

/// Multiplies the weight of 8 bits by its scale: `--dequantize`.
pub(super) fn dequantize(account: &mut Account, dtype: DType) {
    let codes = account.take("model.packed.weight");
    let scale = account.take("model.packed.weight_scale");
    account.state.remove("model.packed.input_scale");
    account.tell(ACTIVATIONS, "model.packed.input_scale");
    account.tell(DEQUANTIZED, "model.packed.weight");
    let scales = numbers(&scale);
    let (mut products, mut lost) = (Vec::new(), Lost::default());
    for (index, code) in numbers(&codes).into_iter().enumerate() {
        let (row, column) = (index / 6, index % 6);
        let scale = match scales.len() {
            1 => scales[0],
            4 => scales[row],
            _ => scales[row / 2 * 3 + column / 2],
        };
        let product = f64::from(code as f32 * scale as f32);
        let [rounded] = numbers(&PlainTensor {
            dtype,
            shape: Vec::new(),
            data: encoded(dtype, &[product]),
        })[..] else {
            panic!("one number")
        };
        if scale.is_finite() {
            lost.infinite += usize::from(code.is_finite() && rounded.is_infinite());
        } else {
            lost.spoiled += usize::from(code.is_finite());
        }
        lost.zero += usize::from(code != 0.0 && scale != 0.0 && rounded == 0.0);
        products.push(product);
    }
    account.tell_lost("model.packed.weight", lost);
    let data = encoded(dtype, &products);
    let shape = codes.shape;
    account.put("model.packed.weight", PlainTensor { dtype, shape, data });
}

/// Casts tensors: `--dtype`, and `--cast-optimizer` if `with_optimizer`. `constants` are the keys
/// in the result of what is never cast.
pub(super) fn cast(account: &mut Account, dtype: DType, with_optimizer: bool) {
    let scales: Vec<String> = account
        .state
        .keys()
        .filter(|key| is_scale(key, &account.state))
        .cloned()
        .collect();
    for (key, item) in account.state.clone() {
        let PlainValue::Tensor(tensor) = item else {
            continue;
        };
        let is_number = tensor.dtype.is_float() || tensor.dtype == DType::Complex64;
        let is_in_optimizer = key.contains("optim.");
        if !is_number || tensor.dtype == dtype {
            continue;
        }
        if is_in_optimizer && !with_optimizer {
            account.tell(KEPT, key);
            continue;
        }
        if !CASTABLE.contains(&tensor.dtype) {
            account.tell(KEPT, format!("{key}: {}", tensor.dtype));
            continue;
        }
        if is_constant(&key, &tensor) || scales.contains(&key) {
            account.tell(KEPT, key);
            continue;
        }
        let before = numbers(&tensor);
        let shape = tensor.shape;
        let data = encoded(dtype, &before);
        let cast = PlainTensor { dtype, shape, data };
        let mut lost = Lost::default();
        for (before, after) in before.into_iter().zip(numbers(&cast)) {
            lost.count(before, after);
        }
        account.tell_lost(&key, lost);
        account.put(key, cast);
    }
}

/// Returns `true` for a hyperparameter or a count.
fn is_constant(key: &str, tensor: &PlainTensor) -> bool {
    let name = key.rsplit('.').next().unwrap_or(key);
    let is_single = tensor.shape.iter().all(|&size| size == 1);
    name == "step"
        || is_single && name == "num_steps"
        || key.contains("param_groups.")
        || is_single && key.contains("optim.state.") && name != "exp_avg"
}

/// Returns `true` for a scale beside codes of 8 bits, or beside the module that has them.
fn is_scale(key: &str, state: &State) -> bool {
    let (parent, name) = key.rsplit_once('.').unwrap_or(("", key));
    name.split('_').any(|word| word == "scale")
        && state.iter().any(|(other, item)| {
            let is_code = matches!(item, PlainValue::Tensor(tensor)
                if tensor.dtype == DType::U8 || tensor.dtype.is_float() && tensor.dtype.bits() == 8);
            let module = other.rsplit_once('.').map_or("", |(module, _)| module);
            let above = module.rsplit_once('.').map(|(above, _)| above);
            is_code && (parent == other || parent == module || Some(parent) == above)
        })
}

/// A rule of a map, for the layers and the embedding of the model.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Rule {
    Rename,
    Transpose,
    Permute,
    Concat(usize),
    TransposedConcat,
    Split(usize, &'static [usize]),
    Stack,
    Unstack,
    Copy,
    Drop,
}

/// A map, and where the model's keys begin.
pub(super) struct KeyMap {
    rules: Vec<Rule>,
    /// The start of the keys of layers, before their numbers.
    layers: String,
    model: String,
}

impl KeyMap {
    /// Returns a map of rules that do not take each other's keys.
    pub(super) fn random(random: &mut Random, selection: &Selection) -> Self {
        let matrices = [
            Rule::Rename,
            Rule::Transpose,
            Rule::Permute,
            Rule::Concat(0),
            Rule::Concat(1),
            Rule::TransposedConcat,
            Rule::Split(0, &[1, 1]),
            Rule::Split(0, &[1, 3]),
            Rule::Split(1, &[1, 2]),
        ];
        let mut rules = vec![random.choose(&matrices)];
        for rule in [Rule::Stack, Rule::Unstack, Rule::Copy, Rule::Drop] {
            if random.chance(2) {
                rules.push(rule);
            }
        }
        let start_of = |key: &str| selection.new_key(key).expect("the model is selected");
        let start_without = |key: &str, end: &str| {
            let key = start_of(key);
            key.strip_suffix(end).expect("it ends so").to_owned()
        };
        KeyMap {
            rules,
            layers: start_without("model.layers.0.bias", "0.bias"),
            model: start_without("model.embed.weight", "embed.weight"),
        }
    }

    pub(super) fn text(&self) -> String {
        let KeyMap { layers, model, .. } = self;
        let mut text = String::new();
        for rule in &self.rules {
            let [first, second, made] =
                ["w1", "w2", "made"].map(|name| format!("{layers}{{i}}.{name}.weight"));
            let line = match rule {
                Rule::Rename => format!("{first} -> {made}"),
                Rule::Transpose => format!("{first} -> {made} | transpose"),
                Rule::Permute => format!("{first} -> {made} | permute(heads)"),
                Rule::Concat(dim) => format!("{first}, {second} -> {made} | concat({dim})"),
                Rule::TransposedConcat => {
                    format!("{first}, {second} -> {made} | transpose | concat(1)")
                }
                Rule::Split(dim, shares) => {
                    let shares: String = shares.iter().map(|share| format!(", {share}")).collect();
                    format!("{first} -> {made}.0, {made}.1 | split({dim}{shares})")
                }
                Rule::Stack => format!("{layers}{{i}}.bias -> {model}stacked | stack(i)"),
                Rule::Unstack => {
                    format!("{layers}{{i}}.experts -> {layers}{{i}}.expert.{{e}} | unstack(e)")
                }
                Rule::Copy => format!("copy {model}embed.weight -> {model}head.weight"),
                Rule::Drop => format!("drop {layers}{{i}}.norm.weight"),
            };
            text.push_str(&line);
            text.push('\n');
        }
        text
    }

    /// Applies the map, and tells the keys that no rule has taken.
    pub(super) fn apply(&self, account: &mut Account) {
        let before: BTreeSet<String> = account.state.keys().cloned().collect();
        for rule in &self.rules {
            self.apply_rule(*rule, account);
        }
        for key in before {
            if account.has(&key) {
                account.tell(UNMATCHED, key);
            }
        }
    }

    fn apply_rule(&self, rule: Rule, account: &mut Account) {
        let KeyMap { layers, model, .. } = self;
        if rule == Rule::Stack {
            let biases: Vec<PlainTensor> = (0..LAYERS)
                .map(|layer| account.take(&format!("{layers}{layer}.bias")))
                .collect();
            let shape = vec![LAYERS, 4];
            let stacked = gathered(&biases, shape, |index| (index[0], vec![index[1]]));
            return account.put(format!("{model}stacked"), stacked);
        }
        if rule == Rule::Copy {
            let embedding = account.state[&format!("{model}embed.weight")].clone();
            account
                .state
                .insert(format!("{model}head.weight"), embedding);
            return;
        }
        for layer in 0..LAYERS {
            let key = |name: &str| format!("{layers}{layer}.{name}");
            let made = key("made.weight");
            let mut matrices = |names: &[&str]| -> Vec<PlainTensor> {
                let keys = names.iter().map(|name| key(&format!("{name}.weight")));
                keys.map(|key| account.take(&key)).collect()
            };
            let tensor = match rule {
                Rule::Rename => matrices(&["w1"]).remove(0),
                Rule::Transpose => gathered(&matrices(&["w1"]), vec![6, 4], |index| {
                    (0, vec![index[1], index[0]])
                }),
                // The even rows of the head, then the odd ones.
                Rule::Permute => gathered(&matrices(&["w1"]), vec![4, 6], |index| {
                    (0, vec![[0, 2, 1, 3][index[0]], index[1]])
                }),
                Rule::Concat(0) => gathered(&matrices(&["w1", "w2"]), vec![8, 6], |index| {
                    (index[0] / 4, vec![index[0] % 4, index[1]])
                }),
                Rule::Concat(_) => gathered(&matrices(&["w1", "w2"]), vec![4, 12], |index| {
                    (index[1] / 6, vec![index[0], index[1] % 6])
                }),
                Rule::TransposedConcat => gathered(&matrices(&["w1", "w2"]), vec![6, 8], |index| {
                    (index[1] / 4, vec![index[1] % 4, index[0]])
                }),
                Rule::Split(dim, shares) => {
                    let whole = matrices(&["w1"]);
                    let unit = whole[0].shape[dim] / shares.iter().sum::<usize>();
                    let mut start = 0;
                    for (part, share) in shares.iter().enumerate() {
                        let mut shape = whole[0].shape.clone();
                        shape[dim] = share * unit;
                        let tensor = gathered(&whole, shape, |index| {
                            let mut index = index.to_vec();
                            index[dim] += start;
                            (0, index)
                        });
                        account.put(format!("{made}.{part}"), tensor);
                        start += share * unit;
                    }
                    continue;
                }
                Rule::Unstack => {
                    let experts = [account.take(&key("experts"))];
                    for expert in 0..3 {
                        let tensor = gathered(&experts, vec![2, 4], |index| {
                            (0, vec![expert, index[0], index[1]])
                        });
                        account.put(key(&format!("expert.{expert}")), tensor);
                    }
                    continue;
                }
                Rule::Drop => {
                    account.take(&key("norm.weight"));
                    continue;
                }
                Rule::Stack | Rule::Copy => unreachable!("they are not of one layer"),
            };
            account.put(made, tensor);
        }
    }

    /// Returns what the reversed map makes of the result, where `before` went into the map: what
    /// was dropped stays away, and a copy stays.
    pub(super) fn undone(&self, before: &State) -> State {
        let mut undone = before.clone();
        if self.rules.contains(&Rule::Drop) {
            undone
                .retain(|key, _| !(key.starts_with(&self.layers) && key.ends_with(".norm.weight")));
        }
        if self.rules.contains(&Rule::Copy) {
            let embedding = undone[&format!("{}embed.weight", self.model)].clone();
            undone.insert(format!("{}head.weight", self.model), embedding);
        }
        undone
    }
}

/// Makes a tensor of this shape; `origin` tells for each index the source and the index there.
fn gathered(
    sources: &[PlainTensor],
    shape: Vec<usize>,
    origin: impl Fn(&[usize]) -> (usize, Vec<usize>),
) -> PlainTensor {
    let dtype = sources[0].dtype;
    let size = dtype.size_in_bytes() as usize;
    let mut data = Vec::new();
    for position in 0..shape.iter().product::<usize>() {
        let mut index = vec![0; shape.len()];
        let mut remaining = position;
        for dim in (0..shape.len()).rev() {
            index[dim] = remaining % shape[dim];
            remaining /= shape[dim];
        }
        let (source, index) = origin(&index);
        let source = &sources[source];
        let place = index
            .iter()
            .zip(&source.shape)
            .fold(0, |place, (index, size)| place * size + index);
        data.extend_from_slice(&source.data[place * size..][..size]);
    }
    PlainTensor { dtype, shape, data }
}
