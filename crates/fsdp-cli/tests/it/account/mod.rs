//! The account of every command that writes a checkpoint: for random states, options and formats,
//! what went in is what came out and what was told.

#![expect(
    clippy::print_stdout,
    reason = "of a case that fails, the commands are printed"
)]

mod model;
mod tree;

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;

use fsdp_formats::checkpoint::{Checkpoint, open};
use fsdp_formats::internals::encode_value;
use fsdp_formats::reader::OpenOptions;
use fsdp_layout::{DType, PlainTensor, PlainValue, TensorBox};
use proptest::prelude::*;
use serde_json::{Value, json};
use tempfile::TempDir;

use self::model::{
    Account, FROM_FIRST, INFINITE, KeyMap, Lost, SPOILED, Selection, State, numbers,
};
use self::tree::{CASTABLE, Random, dict, random_state, tensor_of, with_other_elements};
use crate::common::fsdp;

/// Lines about names of parameters, which [`check_names`] looks at, and about containers, which are
/// not part of a flat state.
const OTHER_LINES: [&str; 5] = [
    "got the new names of parameters",
    "kept the old name in the optimizer",
    "lost its kind by the map",
    "of optimizer state became the integer",
    "of an optimizer was added, empty",
];

/// Reads all tensors and values of a checkpoint.
fn read_state(checkpoint: &dyn Checkpoint) -> State {
    let mut state = State::new();
    for key in checkpoint.metadata().entries.keys() {
        let item = match checkpoint.metadata().tensor(key) {
            Some(tensor) => {
                let (dtype, shape) = (tensor.properties.dtype, tensor.shape.clone());
                let bounds = TensorBox::whole(&shape);
                let mut data = vec![0; bounds.numel() * dtype.size_in_bytes() as usize];
                checkpoint.read_box(key, &bounds, &mut data).unwrap();
                PlainValue::Tensor(PlainTensor { dtype, shape, data })
            }
            None => checkpoint.read_value(key).unwrap(),
        };
        state.insert(key.clone(), item);
    }
    state
}

fn opened(path: &str) -> Box<dyn Checkpoint> {
    open(Path::new(path), OpenOptions::default()).unwrap()
}

/// The places of one case.
struct Places {
    parent: TempDir,
    count: usize,
}

impl Places {
    /// Returns a path at which nothing is yet.
    fn next(&mut self) -> String {
        self.count += 1;
        let path = self.parent.path().join(format!("place-{}", self.count));
        path.to_str().unwrap().to_owned()
    }

    /// Writes a state dict as `torch.save` does.
    fn write(&mut self, state: &PlainValue) -> String {
        let path = format!("{}.pt", self.next());
        write_file(Path::new(&path), &encode_value(state).unwrap());
        path
    }

    /// Writes a state dict, and maybe converts it to another format.
    fn source(&mut self, random: &mut Random, state: &PlainValue) -> String {
        let source = self.write(state);
        if random.chance(2) {
            return source;
        }
        let account = Account {
            state: read_state(&*opened(&source)),
            ..Account::default()
        };
        self.run_and_check(
            random,
            &["convert".to_owned(), source.clone()],
            &source,
            &account,
        )
    }

    /// Runs a command that writes a checkpoint of a random format, and compares that checkpoint and
    /// the command's report with the account. Returns the path of the checkpoint.
    fn run_and_check(
        &mut self,
        random: &mut Random,
        command: &[String],
        source: &str,
        expected: &Account,
    ) -> String {
        let path = self.next();
        let mut arguments = command.to_vec();
        arguments.push(path.clone());
        if command[0] == "reshard" {
            arguments.extend(["--world-size".to_owned(), (1 + random.below(3)).to_string()]);
        } else if !command.contains(&"--to".to_owned()) {
            arguments.extend(random_target(random));
        }
        let report = run_json(&arguments);
        check(&report, &*opened(source), &*opened(&path), expected);
        path
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a source, a map and a configuration are made by hand"
)]
fn write_file(path: &Path, bytes: &[u8]) {
    std::fs::write(path, bytes).unwrap();
}

/// Returns the options of a random format.
fn random_target(random: &mut Random) -> Vec<String> {
    let ranks = (1 + random.below(3)).to_string();
    let target: &[&str] = match random.below(6) {
        0 => &["dcp", "--world-size", &ranks],
        1 => &["safetensors"],
        2 => &["hf", "--max-shard-size", "300B"],
        3 => &["hf-sharded", "--world-size", &ranks],
        4 => &["torch-checkpointing", "--world-size", &ranks],
        _ => &["torch"],
    };
    ["--to"]
        .iter()
        .chain(target)
        .map(|&argument| argument.to_owned())
        .collect()
}

/// Runs a command with `--json`, which must succeed, and returns its report.
fn run_json(arguments: &[String]) -> Value {
    let mut arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    arguments.push("--json");
    println!("fsdp {}", arguments.join(" "));
    let output = fsdp(&arguments).output().unwrap();
    let messages = String::from_utf8(output.stderr).unwrap();
    println!("{messages}");
    assert!(output.status.success(), "{messages}");
    serde_json::from_slice(&output.stdout).unwrap()
}

/// Returns the names in a list of a report.
fn names_in(list: &Value) -> BTreeSet<String> {
    let names = list.as_array().unwrap().iter();
    names
        .map(|name| name.as_str().unwrap().to_owned())
        .collect()
}

/// Checks what a command has written and told.
fn check(report: &Value, source: &dyn Checkpoint, written: &dyn Checkpoint, expected: &Account) {
    let containers = names_in(&report["containers"]);
    let mut state = expected.state.clone();
    // A state dict that cannot be cut into items is one.
    if containers.iter().any(|place| place.starts_with("the root")) {
        let items = state.into_iter();
        state = items
            .map(|(key, item)| (format!("model.{key}"), item))
            .collect();
    }
    let found = read_state(written);
    let keys: BTreeSet<&String> = found.keys().collect();
    assert_eq!(keys, state.keys().collect());
    for (key, item) in &state {
        let may_have_names = key.ends_with(".params") && key.contains("param_groups.");
        if may_have_names {
            check_names(item, &found[key], &found, report);
        } else {
            assert!(
                item.same_bits(&found[key]),
                "{key}: {item:?} {:?}",
                found[key]
            );
        }
    }
    // The report must name exactly the changes that the account expects.
    let mut told: BTreeMap<&str, BTreeSet<String>> = BTreeMap::new();
    for change in report["changes"].as_array().unwrap() {
        let what = change["what"].as_str().unwrap();
        let names = names_in(&change["names"]);
        assert_eq!(change["count"], names.len(), "{change}");
        if OTHER_LINES.iter().any(|line| what.contains(line)) {
            continue;
        }
        let mut lines = model::LINES.iter().filter(|line| what.contains(*line));
        let line = lines.next().unwrap_or_else(|| panic!("unexpected: {what}"));
        told.entry(*line).or_default().extend(names);
    }
    let expected_told: BTreeMap<&str, BTreeSet<String>> = expected.told.clone();
    assert_eq!(told, expected_told);
    // Values that are in a file beside the tensors.
    if !report["aside_file"].is_null() {
        let is_value = |(_, item): &(&String, &PlainValue)| !matches!(item, PlainValue::Tensor(_));
        let values = state.iter().filter(is_value).map(|(key, _)| key.clone());
        assert_eq!(names_in(&report["aside"]), values.collect());
    }
    check_integer_keys(report, source, written, &state);
}

/// Checks the names of parameters in a value: they stand for what is there, and a value that
/// changed is told.
fn check_names(before: &PlainValue, after: &PlainValue, state: &State, report: &Value) {
    let is_told = |line: &str| {
        let changes = report["changes"].as_array().unwrap();
        changes
            .iter()
            .any(|change| change["what"].as_str().unwrap().contains(line))
    };
    assert!(before.same_bits(after) != is_told(OTHER_LINES[0]));
    let PlainValue::List(names) = after else {
        panic!("no list: {after:?}");
    };
    let has_states = state.keys().any(|key| key.contains("optim.state."));
    for name in names.iter().filter_map(PlainValue::as_str) {
        let stands_for_a_key = state
            .keys()
            .any(|key| key.ends_with(name) || key.contains(&format!("optim.state.{name}.")));
        assert!(
            stands_for_a_key || is_told(OTHER_LINES[1]) || has_states,
            "{name}"
        );
    }
}

/// Checks that keys of a dict that are integers stay so, or are told.
fn check_integer_keys(
    report: &Value,
    source: &dyn Checkpoint,
    written: &dyn Checkpoint,
    state: &State,
) {
    let has_integer_keys = |checkpoint: &dyn Checkpoint| {
        checkpoint.structure().is_some_and(|structure| {
            let places = structure.describe_untold();
            places.iter().any(|place| place.contains("type int"))
        })
    };
    if !has_integer_keys(source) || has_integer_keys(written) {
        return;
    }
    let is_left_out = !state.keys().any(|key| key.contains("state."));
    let text = report.to_string();
    assert!(is_left_out || text.contains("type int"), "{text}");
}

/// Returns the numbers of a tensor, and whether they may be the sums that are rounded to it. Counts
/// the finite sums that became infinite.
fn check_rounded(key: &str, tensor: &PlainTensor, sums: &[f64]) -> Lost {
    let mut lost = Lost::default();
    let size = (tensor.dtype.size_in_bytes() as usize).min(tensor.data.len().max(1));
    let found = numbers(tensor);
    assert_eq!(found.len(), sums.len(), "{key}");
    for (index, (&rounded, &sum)) in found.iter().zip(sums).enumerate() {
        lost.infinite += usize::from(sum.is_finite() && rounded.is_infinite());
        if !sum.is_finite() || tensor.dtype == DType::Complex64 {
            let single = f64::from(sum as f32);
            let is_same = rounded == sum || rounded == single;
            assert!(
                is_same || rounded.is_nan() && sum.is_nan(),
                "{key}: {rounded} {sum}"
            );
            continue;
        }
        if rounded.is_infinite() {
            continue;
        }
        // No neighbour is nearer.
        for step in [1, -1] {
            let mut neighbour = tensor.data[index * size..][..size].to_vec();
            let low = i16::from_le_bytes([neighbour[0], neighbour[1]]).wrapping_add(step);
            neighbour[..2].copy_from_slice(&low.to_le_bytes());
            let [neighbour] = numbers(&PlainTensor {
                dtype: tensor.dtype,
                shape: Vec::new(),
                data: neighbour,
            })[..] else {
                panic!("one number")
            };
            assert!(
                neighbour.is_nan() || (rounded - sum).abs() <= (neighbour - sum).abs(),
                "{key}: {rounded} is not the nearest to {sum}, {neighbour} is nearer"
            );
        }
    }
    lost
}

/// Checks the checkpoint that a merge has written, and its report. `sums_of` returns the exact
/// elements of a tensor that is computed, and `None` for one that must be that of the `first`
/// checkpoint. A computed tensor must have these elements, rounded to the nearest, and the report
/// must name the tensors with elements that became infinite, and those taken from the first.
fn check_merge(
    report: &Value,
    first: &State,
    found: &State,
    sums_of: impl Fn(&str, &PlainTensor) -> Option<Vec<f64>>,
) {
    assert_eq!(
        first.keys().collect::<Vec<_>>(),
        found.keys().collect::<Vec<_>>()
    );
    let mut expected = Account::default();
    for (key, item) in found {
        let sums = match item {
            PlainValue::Tensor(tensor) => sums_of(key, tensor).map(|sums| (tensor, sums)),
            _ => None,
        };
        match sums {
            Some((tensor, sums)) => {
                let mut lost = check_rounded(key, tensor, &sums);
                if let PlainValue::Tensor(first) = &first[key] {
                    let both = numbers(first).into_iter().zip(&sums);
                    let spoiled = both.filter(|(first, sum)| first.is_finite() && !sum.is_finite());
                    lost.spoiled = spoiled.count();
                }
                expected.tell_lost(key, lost);
            }
            None => {
                assert!(item.same_bits(&first[key]), "{key}");
                expected.tell(FROM_FIRST, key);
            }
        }
    }
    for line in [FROM_FIRST, INFINITE, SPOILED] {
        let changes = report["changes"].as_array().unwrap().iter();
        let mut told = BTreeSet::new();
        for change in changes.filter(|change| change["what"].as_str().unwrap().contains(line)) {
            told.extend(names_in(&change["names"]));
        }
        // An adapter changes what it names, and all else is the base's.
        if line != FROM_FIRST || !told.is_empty() {
            assert_eq!(told, expected.told.remove(line).unwrap_or_default());
        }
    }
}

/// `fsdp convert` with all its options.
fn convert(random: &mut Random, places: &mut Places) {
    let path = {
        let state = random_state(random);
        places.source(random, &state)
    };
    let mut account = Account {
        state: read_state(&*opened(&path)),
        ..Account::default()
    };
    let mut command = vec!["convert".to_owned(), path.clone()];
    let mut selection = Selection::random(random, &account.state);
    let dtype = random.chance(2).then(|| random.choose(&CASTABLE));
    if random.chance(4) {
        command.push("--dequantize".to_owned());
        // A weight of 8 bits without a scale is an error.
        for (key, item) in &account.state {
            if let PlainValue::Tensor(tensor) = item
                && (tensor.dtype == DType::U8
                    || tensor.dtype.bits() == 8 && tensor.dtype.is_float())
                && key != "model.packed.weight"
            {
                selection.excluded.insert(key.clone());
            }
        }
        model::dequantize(&mut account, dtype.unwrap_or(DType::BF16));
    }
    command.extend(selection.arguments());
    selection.apply(&mut account);
    let map = random.chance(2).then(|| KeyMap::random(random, &selection));
    let before_map = account.state.clone();
    let map_path = places.next();
    if let Some(map) = &map {
        write_file(Path::new(&map_path), map.text().as_bytes());
        println!("{}", map.text());
        command.extend(["--map", &map_path, "--set", "heads=1"].map(str::to_owned));
        map.apply(&mut account);
    }
    if let Some(dtype) = dtype {
        let with_optimizer = random.chance(2);
        command.extend(["--dtype".to_owned(), dtype.torch_name().to_owned()]);
        command.extend(with_optimizer.then(|| "--cast-optimizer".to_owned()));
        model::cast(&mut account, dtype, with_optimizer);
    }
    if random.chance(4) {
        command.extend(["--to", "hf", "--tp", "2", "--tp-rule", "**=replicate"].map(str::to_owned));
        // The first rule that fits counts, so these come before.
        let at = command.len() - 2;
        for rule in [
            "w1=colwise",
            "w2=rowwise",
            "embed=vocab",
            "expert.0=colwise",
        ] {
            let layer = rule.split('=').next().unwrap();
            let is_named = |key: &String| {
                key.ends_with(&format!(".{layer}.weight")) || key.ends_with(&format!(".{layer}"))
            };
            if account.state.keys().any(is_named) {
                command.splice(at..at, ["--tp-rule".to_owned(), rule.to_owned()]);
            }
        }
    }
    let written = places.run_and_check(random, &command, &path, &account);
    // Back through the map.
    if let Some(map) = map.filter(|_| dtype.is_none())
        && opened(&written).metadata().entries.len() == account.state.len()
        && account
            .state
            .keys()
            .all(|key| opened(&written).metadata().entries.contains_key(key))
    {
        let back = places.next();
        let command = [
            "convert",
            &written,
            &back,
            "--to",
            "torch",
            "--map",
            &map_path,
            "--map-reverse",
            "--set",
            "heads=1",
        ];
        run_json(&command.map(str::to_owned));
        let (found, expected) = (read_state(&*opened(&back)), map.undone(&before_map));
        assert_eq!(
            found.keys().collect::<Vec<_>>(),
            expected.keys().collect::<Vec<_>>()
        );
        // Names of parameters that one way cannot rename stay in the other.
        for (key, item) in expected.iter().filter(|(key, _)| !key.ends_with(".params")) {
            assert!(
                item.same_bits(&found[key]),
                "{key}: {item:?} {:?}",
                found[key]
            );
        }
    }
}

/// Reshards a random checkpoint of any format with `fsdp reshard`, and checks the result.
fn check_random_reshard(random: &mut Random, places: &mut Places) {
    let state = random_state(random);
    let path = places.source(random, &state);
    let account = Account {
        state: read_state(&*opened(&path)),
        ..Account::default()
    };
    places.run_and_check(
        random,
        &["reshard".to_owned(), path.clone()],
        &path,
        &account,
    );
}

/// Returns `true` for the key of a scale beside a weight of integers.
fn is_scale_of_integers(state: &State, key: &str) -> bool {
    let (parent, name) = key.rsplit_once('.').unwrap_or(("", key));
    let weight = format!("{parent}.weight");
    let is_integer = |item: &PlainValue| {
        let PlainValue::Tensor(tensor) = item else {
            return false;
        };
        matches!(tensor.dtype, DType::U8 | DType::I32 | DType::I64)
    };
    ["scale", "weight_scale"].contains(&name)
        && state
            .get(weight.trim_start_matches('.'))
            .is_some_and(is_integer)
}

/// Returns `true` for a tensor of 8-bit floats.
fn is_8_bit_float(item: &PlainValue) -> bool {
    let PlainValue::Tensor(tensor) = item else {
        return false;
    };
    tensor.dtype.is_float() && tensor.dtype.bits() == 8
}

/// Averages up to three random checkpoints with `fsdp merge`, with or without weights, and checks
/// the result.
fn check_random_average(random: &mut Random, places: &mut Places) {
    let first = random_state(random);
    let mut paths = vec![places.source(random, &first)];
    for _ in 0..random.below(3) {
        let next = with_other_elements(random, &first);
        paths.push(places.source(random, &next));
    }
    let mut command = vec!["merge".to_owned()];
    let mut weights = vec![1.0; paths.len()];
    let has_weights = random.chance(2);
    for (path, weight) in paths.iter().zip(&mut weights) {
        command.extend(["--from".to_owned(), path.clone()]);
        if has_weights {
            *weight = random.choose(&[0.25, 2.0, -0.5, 7.0]);
            command.extend(["--weight".to_owned(), weight.to_string()]);
        }
    }
    let sum: f64 = weights.iter().sum();
    if sum == 0.0 {
        return;
    }
    let mut states: Vec<State> = paths
        .iter()
        .map(|path| read_state(&*opened(path)))
        .collect();
    // There is no average of 8-bit floats, nor of the scales of integers.
    let excluded: Vec<String> = states[0]
        .iter()
        .filter(|(key, item)| is_8_bit_float(item) || is_scale_of_integers(&states[0], key))
        .map(|(key, _)| key.clone())
        .collect();
    for key in &excluded {
        command.extend(["--exclude".to_owned(), key.clone()]);
        states.iter_mut().for_each(|state| drop(state.remove(key)));
    }
    let to = places.next();
    command.push(to.clone());
    command.extend(["--to", "torch"].map(str::to_owned));
    let report = run_json(&command);
    let found = read_state(&*opened(&to));
    check_merge(&report, &states[0], &found, |key, tensor| {
        let name = key.rsplit('.').next().unwrap_or(key);
        let is_single = tensor.shape.iter().all(|&size| size == 1);
        let is_count = name == "step" || is_single && name == "num_steps";
        let is_number = CASTABLE.contains(&tensor.dtype) || tensor.dtype == DType::Complex64;
        if is_count || !is_number || key.starts_with("optim.") {
            return None;
        }
        let mut sums = vec![0.0; numbers(tensor).len()];
        for (state, weight) in states.iter().zip(&weights) {
            let PlainValue::Tensor(part) = &state[key] else {
                panic!("{key}")
            };
            for (total, number) in sums.iter_mut().zip(numbers(part)) {
                *total += weight / sum * number;
            }
        }
        Some(sums)
    });
}

/// Merges a random adapter into a random checkpoint with `fsdp merge --lora`, and checks the
/// result. The adapter has an update of a tensor, a tensor that replaces one, or both.
fn check_random_lora(random: &mut Random, places: &mut Places) {
    let state = random_state(random);
    let path = places.source(random, &state);
    let base = read_state(&*opened(&path));
    let rank = 1 + random.below(3);
    let factor_dtype = random.choose(&CASTABLE);
    let start = "base_model.model.model.layers";
    let mut items = Vec::new();
    for name in ["0.w1", "1.w2"] {
        let first = tensor_of(random, factor_dtype, &[rank, 6]);
        let second = tensor_of(random, factor_dtype, &[4, rank]);
        items.push((format!("{start}.{name}.lora_A.weight"), first));
        items.push((format!("{start}.{name}.lora_B.weight"), second));
    }
    let norm = tensor_of(random, DType::F32, &[4]);
    items.push((format!("{start}.1.norm.weight"), norm.clone()));
    let adapter = places.next();
    std::fs::create_dir(&adapter).unwrap();
    let config = json!({ "peft_type": "LORA", "r": rank, "lora_alpha": 3.0 });
    let place = Path::new(&adapter);
    write_file(
        &place.join("adapter_config.json"),
        config.to_string().as_bytes(),
    );
    let adapter_items: Vec<(&str, PlainValue)> = items
        .iter()
        .map(|(key, item)| (&**key, item.clone()))
        .collect();
    let bytes = encode_value(&dict(adapter_items)).unwrap();
    write_file(&place.join("adapter_model.bin"), &bytes);
    let to = places.next();
    let command = [
        "merge", "--from", &path, "--lora", &adapter, &to, "--to", "torch",
    ];
    let report = run_json(&command.map(str::to_owned));
    let found = read_state(&*opened(&to));
    let mut replaced = base.clone();
    replaced.insert("model.layers.1.norm.weight".to_owned(), norm);
    check_merge(&report, &replaced, &found, |key, _| {
        let name = key.strip_prefix("model.layers.")?.strip_suffix(".weight")?;
        let factor = |letter: &str| {
            let wanted = format!("{start}.{name}.lora_{letter}.weight");
            items
                .iter()
                .find(|(key, _)| *key == wanted)
                .map(|(_, item)| item)
        };
        let (PlainValue::Tensor(first), PlainValue::Tensor(second), PlainValue::Tensor(weight)) =
            (factor("A")?, factor("B")?, &base[key])
        else {
            panic!("{key}")
        };
        let (first, second) = (numbers(first), numbers(second));
        let mut sums = numbers(weight);
        for (index, total) in sums.iter_mut().enumerate() {
            let (row, column) = (index / 6, index % 6);
            for inner in 0..rank {
                *total +=
                    3.0 / rank as f64 * second[row * rank + inner] * first[inner * 6 + column];
            }
        }
        Some(sums)
    });
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 60, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn what_went_in_is_what_came_out_and_what_was_told(seed in any::<u64>()) {
        let random = &mut Random(seed);
        let mut places = Places { parent: TempDir::new().unwrap(), count: 0 };
        match random.below(8) {
            0 => check_random_average(random, &mut places),
            1 => check_random_lora(random, &mut places),
            2 => check_random_reshard(random, &mut places),
            _ => convert(random, &mut places),
        }
    }
}
