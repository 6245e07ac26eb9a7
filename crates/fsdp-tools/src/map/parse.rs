//! Reading the text of a map.

use std::collections::BTreeSet;

use fsdp_layout::count_text;

use super::operation::{HeadCounts, Operation};
use super::rule::{KeyRule, MapError, ParsedMap, StrictKeys, Values};
use super::template::Template;

/// Parses the lines of a map.
pub(super) fn parse_map(text: &str, values: &Values) -> Result<ParsedMap, MapError> {
    let mut map = ParsedMap::default();
    for (index, line) in text.lines().enumerate() {
        let line_number = index + 1;
        let code = line.split_once('#').map_or(line, |(code, _)| code).trim();
        let parsed = match code.strip_prefix("strict ") {
            _ if code.is_empty() => continue,
            Some(keys) => parse_strict(keys).map(|keys| map.strict.push(keys)),
            None => parse_rule(code, line_number, values).map(|rule| map.rules.push(rule)),
        };
        parsed.map_err(|reason| MapError::Line {
            line: line_number,
            reason,
        })?;
    }
    Ok(map)
}

/// Parses the keys of a line `strict OLD -> NEW`.
fn parse_strict(text: &str) -> Result<StrictKeys, String> {
    let (source, target) = text
        .split_once("->")
        .ok_or("a line of strict keys is `strict OLD -> NEW`")?;
    Ok(StrictKeys {
        source: Template::parse(source.trim())?,
        target: Template::parse(target.trim())?,
    })
}

/// Parses one line: `OLD -> NEW | OPERATION | …`, `copy OLD -> NEW`, or `drop OLD`.
fn parse_rule(text: &str, line: usize, values: &Values) -> Result<KeyRule, String> {
    if let Some(dropped) = text.strip_prefix("drop ") {
        return Ok(KeyRule {
            line,
            sources: parse_templates(dropped)?,
            targets: Vec::new(),
            operations: Vec::new(),
            is_copy: false,
        });
    }
    let (is_copy, text) = match text.strip_prefix("copy ") {
        Some(copied) => (true, copied),
        None => (false, text),
    };
    let (sources, new_part) = text
        .split_once("->")
        .ok_or("a rule is `OLD -> NEW`, `copy OLD -> NEW`, or `drop OLD`")?;
    let mut parts = new_part.split('|');
    let targets = parts.next().expect("a split text has a first part");
    let mut rule = KeyRule {
        line,
        targets: parse_templates(targets)?,
        operations: parts
            .map(|text| parse_operation(text.trim(), values))
            .collect::<Result<_, _>>()?,
        sources: parse_templates(sources)?,
        is_copy,
    };
    if is_copy && !rule.operations.is_empty() {
        return Err("a copy has no operations".to_owned());
    }
    check_rule(&rule)?;
    // The reversed map has to fit what this one makes: `{rest}` of `{rest*}` may have dots.
    for target in &mut rule.targets {
        for source in &rule.sources {
            target.fit_texts_of(source);
        }
    }
    Ok(rule)
}

/// Parses templates that are separated by commas.
fn parse_templates(text: &str) -> Result<Vec<Template>, String> {
    text.split(',')
        .map(|key| Template::parse(key.trim()))
        .collect()
}

/// Checks that every name of the new keys gets a text, and that the operations can give so many
/// tensors.
fn check_rule(rule: &KeyRule) -> Result<(), String> {
    // The names that have a text, and the number of tensors, after each operation: a new key may
    // only use these names, and each tensor needs a key.
    let mut bound_names: BTreeSet<&str> = rule.sources[0].names().collect();
    let mut tensor_count = rule.sources.len();
    for (index, operation) in rule.operations.iter().enumerate() {
        tensor_count = match operation {
            Operation::Concat { .. } | Operation::JoinQkv { .. } => 1,
            Operation::Split { .. } => rule.targets.len(),
            Operation::SplitQkv { .. } => 3,
            Operation::Unstack { name } if index == 0 && rule.sources.len() == 1 => {
                bound_names.insert(name);
                1
            }
            Operation::Unstack { .. } => {
                return Err("`unstack` comes first, and takes one tensor".to_owned());
            }
            Operation::Stack { name }
                if index + 1 == rule.operations.len() && rule.targets.len() == 1 =>
            {
                if !bound_names.remove(name.as_str()) {
                    return Err(format!("no old key has `{{{name}}}`"));
                }
                tensor_count
            }
            Operation::Stack { .. } => {
                return Err("`stack` comes last, and gives one tensor".to_owned());
            }
            _ => tensor_count,
        };
    }
    if tensor_count != rule.targets.len() {
        return Err(format!(
            "{} cannot get {}",
            count_text(tensor_count, "tensor", "tensors"),
            count_text(rule.targets.len(), "new key", "new keys")
        ));
    }
    // The further old keys have the same names as the first one, or the name that counts the stack.
    let stack_name = match rule.operations.last() {
        Some(Operation::Stack { name }) => Some(name.as_str()),
        _ => None,
    };
    let target_names = rule.targets.iter().flat_map(Template::names);
    let source_names = rule.sources[1..]
        .iter()
        .flat_map(Template::names)
        .filter(|name| Some(*name) != stack_name);
    match target_names
        .chain(source_names)
        .find(|name| !bound_names.contains(name))
    {
        Some(name) => Err(format!("the first old key has no `{{{name}}}`")),
        None => Ok(()),
    }
}

/// Parses an operation, such as `split(0, 2, 1)`. Its arguments are numbers, or names that have
/// values.
fn parse_operation(text: &str, values: &Values) -> Result<Operation, String> {
    // An operation without arguments has no brackets.
    let (name, arguments) = match text.split_once('(') {
        Some((name, ending)) => {
            let argument_list = ending
                .strip_suffix(')')
                .ok_or_else(|| format!("`{text}` has no `)`"))?;
            (
                name.trim(),
                argument_list.split(',').map(str::trim).collect(),
            )
        }
        None => (text, Vec::new()),
    };
    Ok(match (name, &arguments[..]) {
        ("transpose", []) => Operation::Transpose,
        ("concat", [dim]) => Operation::Concat {
            dim: parse_number(dim, values)?,
        },
        ("split", [dim, shares @ ..]) => {
            let shares = shares
                .iter()
                .map(|share| parse_number(share, values))
                .collect::<Result<_, _>>()?;
            Operation::Split {
                dim: parse_number(dim, values)?,
                shares,
            }
        }
        ("permute" | "unpermute", [heads]) => Operation::Permute {
            heads: parse_number(heads, values)?,
            is_inverse: name == "unpermute",
        },
        ("split_qkv" | "join_qkv", [heads, kv_heads]) => {
            let counts = HeadCounts {
                queries: parse_number(heads, values)?,
                keys: parse_number(kv_heads, values)?,
            };
            if name == "split_qkv" {
                Operation::SplitQkv(counts)
            } else {
                Operation::JoinQkv(counts)
            }
        }
        ("unstack", [name]) => Operation::Unstack {
            name: (*name).to_owned(),
        },
        ("stack", [name]) => Operation::Stack {
            name: (*name).to_owned(),
        },
        _ => return Err(format!("`{text}` is no operation")),
    })
}

/// The largest number in a map: sizes are computed from several of them.
const MAX_NUMBER: usize = 1 << 24;

/// Parses an argument that is a number, or a name that has a value.
fn parse_number(text: &str, values: &Values) -> Result<usize, String> {
    let number = text
        .parse()
        .ok()
        .or_else(|| values.get(text).copied())
        .ok_or_else(|| format!("`{text}` has no value: give it with `--set {text}=N`"))?;
    if number > MAX_NUMBER {
        return Err(format!("{number} is too large"));
    }
    Ok(number)
}
