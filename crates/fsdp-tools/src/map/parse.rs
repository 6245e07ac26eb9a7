//! Reading the text of a map.

use std::collections::BTreeSet;

use super::operation::Operation;
use super::rule::{MapError, Rule, Values};
use super::template::Template;

/// Reads the rules of a map.
pub(super) fn rules(text: &str, values: &Values) -> Result<Vec<Rule>, MapError> {
    let mut rules = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.split('#').next().unwrap_or_default().trim();
        if line.is_empty() {
            continue;
        }
        let at = number + 1;
        rules.push(rule(line, at, values).map_err(|reason| MapError::Line { line: at, reason })?);
    }
    Ok(rules)
}

/// Parses one line: `OLD -> NEW | OPERATION | …`, or `drop OLD`.
fn rule(text: &str, line: usize, values: &Values) -> Result<Rule, String> {
    if let Some(dropped) = text.strip_prefix("drop ") {
        return Ok(Rule {
            line,
            sources: templates(dropped)?,
            targets: Vec::new(),
            operations: Vec::new(),
        });
    }
    let (sources, rest) = text
        .split_once("->")
        .ok_or("a rule is `OLD -> NEW`, or `drop OLD`")?;
    let mut parts = rest.split('|');
    let targets = templates(parts.next().unwrap_or_default())?;
    let operations = parts
        .map(|text| operation(text.trim(), values))
        .collect::<Result<Vec<_>, _>>()?;
    let rule = Rule {
        line,
        sources: templates(sources)?,
        targets,
        operations,
    };
    check(&rule)?;
    Ok(rule)
}

/// Parses templates that are separated by commas.
fn templates(text: &str) -> Result<Vec<Template>, String> {
    text.split(',')
        .map(|key| Template::parse(key.trim()))
        .collect()
}

/// Checks that every name of the new keys gets a text, and that the operations can give so many
/// tensors.
fn check(rule: &Rule) -> Result<(), String> {
    let mut known: BTreeSet<&str> = rule.sources[0].names().collect();
    let mut count = rule.sources.len();
    for (at, operation) in rule.operations.iter().enumerate() {
        count = match operation {
            Operation::Concat { .. } | Operation::JoinQkv { .. } => 1,
            Operation::Split { .. } => rule.targets.len(),
            Operation::SplitQkv { .. } => 3,
            Operation::Unstack { name } if at == 0 && rule.sources.len() == 1 => {
                known.insert(name);
                1
            }
            Operation::Unstack { .. } => {
                return Err("`unstack` comes first, and takes one tensor".to_owned());
            }
            Operation::Stack { name }
                if at + 1 == rule.operations.len() && rule.targets.len() == 1 =>
            {
                if !known.remove(name.as_str()) {
                    return Err(format!("no old key has `{{{name}}}`"));
                }
                count
            }
            Operation::Stack { .. } => {
                return Err("`stack` comes last, and gives one tensor".to_owned());
            }
            _ => count,
        };
    }
    if count != rule.targets.len() {
        return Err(format!(
            "{count} tensors cannot get {} new keys",
            rule.targets.len()
        ));
    }
    let stacks = |name: &str| matches!(rule.operations.last(), Some(Operation::Stack { name: of }) if of == name);
    let names = |templates: &[Template]| -> Vec<String> {
        templates
            .iter()
            .flat_map(Template::names)
            .map(str::to_owned)
            .collect()
    };
    let unknown = names(&rule.targets)
        .into_iter()
        .find(|name| !known.contains(name.as_str()));
    let missing = names(&rule.sources[1..])
        .into_iter()
        .find(|name| !known.contains(name.as_str()) && !stacks(name));
    match unknown.or(missing) {
        Some(name) => Err(format!("the first old key has no `{{{name}}}`")),
        None => Ok(()),
    }
}

/// Parses an operation, such as `split(0, 2, 1)`. Its arguments are numbers, or names that have
/// values.
fn operation(text: &str, values: &Values) -> Result<Operation, String> {
    let (name, arguments) = match text.split_once('(') {
        Some((name, rest)) => {
            let inside = rest
                .strip_suffix(')')
                .ok_or_else(|| format!("`{text}` has no `)`"))?;
            (name.trim(), inside.split(',').map(str::trim).collect())
        }
        None => (text, Vec::new()),
    };
    let number = |text: &str| -> Result<usize, String> {
        let value = text.parse().ok().or_else(|| values.get(text).copied());
        match value
            .ok_or_else(|| format!("`{text}` has no value: give it with `--set {text}=N`"))?
        {
            number if number <= 1 << 24 => Ok(number),
            number => Err(format!("{number} is too large")),
        }
    };
    Ok(match (name, &arguments[..]) {
        ("transpose", []) => Operation::Transpose,
        ("concat", [dim]) => Operation::Concat { dim: number(dim)? },
        ("split", [dim, shares @ ..]) => {
            let shares = shares
                .iter()
                .map(|share| number(share))
                .collect::<Result<_, _>>()?;
            Operation::Split {
                dim: number(dim)?,
                shares,
            }
        }
        ("permute", [heads]) => Operation::Permute {
            heads: number(heads)?,
        },
        ("unpermute", [heads]) => Operation::Unpermute {
            heads: number(heads)?,
        },
        ("split_qkv", [heads, kv_heads]) => Operation::SplitQkv {
            heads: number(heads)?,
            kv_heads: number(kv_heads)?,
        },
        ("join_qkv", [heads, kv_heads]) => Operation::JoinQkv {
            heads: number(heads)?,
            kv_heads: number(kv_heads)?,
        },
        ("unstack", [name]) => Operation::Unstack {
            name: (*name).to_owned(),
        },
        ("stack", [name]) => Operation::Stack {
            name: (*name).to_owned(),
        },
        _ => return Err(format!("`{text}` is no operation")),
    })
}
