//! Links between the pages of the book, to pictures, and to headings.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Component, Path, PathBuf};

use super::page::Page;

/// Returns a message for each link that leads nowhere, and for each page that the table of contents
/// does not name.
pub(super) fn check(pages: &[Page], source: &Path) -> Vec<String> {
    let anchors: BTreeMap<&str, BTreeSet<String>> = pages
        .iter()
        .map(|page| (page.name.as_str(), headings(&page.text)))
        .collect();
    let mut broken = Vec::new();
    let mut listed = BTreeSet::from(["SUMMARY.md".to_owned()]);
    for page in pages {
        for link in links(&page.text) {
            // Whether a page of somebody else is there is not for a build without network to ask.
            if link.contains("://") || link.starts_with("mailto:") {
                continue;
            }
            let (path, anchor) = link.split_once('#').unwrap_or((&link, ""));
            let target = if path.is_empty() {
                page.name.clone()
            } else {
                resolve(&page.name, path)
            };
            if page.name == "SUMMARY.md" {
                listed.insert(target.clone());
            }
            match anchors.get(target.as_str()) {
                Some(known) if anchor.is_empty() || known.contains(anchor) => {}
                Some(_) => broken.push(format!("{}: `{link}`: no such heading", page.name)),
                None if source.join(&target).is_file() => {}
                None => broken.push(format!("{}: `{link}`: no such page", page.name)),
            }
        }
    }
    // mdBook builds only what the table of contents names, and what such a page includes.
    for page in pages {
        let is_included = pages.iter().any(|other| {
            other
                .text
                .contains(&format!("{{{{#include {}}}}}", page.name))
        });
        if !listed.contains(&page.name) && !is_included {
            broken.push(format!("{}: not in SUMMARY.md", page.name));
        }
    }
    broken
}

/// Returns the path, below the book's sources, that a link of a page leads to.
fn resolve(page: &str, link: &str) -> String {
    let mut resolved = PathBuf::from(page);
    resolved.pop();
    for component in Path::new(link).components() {
        match component {
            Component::ParentDir => _ = resolved.pop(),
            Component::Normal(part) => resolved.push(part),
            _ => {}
        }
    }
    resolved.to_string_lossy().into_owned()
}

/// Returns the text of a page without its code.
fn prose(text: &str) -> String {
    let mut prose = String::new();
    let mut fenced = false;
    for line in text.lines() {
        if line.trim_start().starts_with("```") {
            fenced = !fenced;
        } else if !fenced {
            // Code in a line: every second part between backticks.
            prose.extend(line.split('`').step_by(2));
            prose.push('\n');
        }
    }
    prose
}

/// Lists the targets of Markdown links and of pictures.
fn links(text: &str) -> Vec<String> {
    let mut found = Vec::new();
    let prose = prose(text);
    // Pictures that need a size are written as HTML.
    for opening in ["](", "src=\"", "href=\""] {
        for after in prose.split(opening).skip(1) {
            let end = after
                .find(|c: char| c == ')' || c == '"' || c.is_whitespace())
                .unwrap_or(after.len());
            found.push(after[..end].to_owned());
        }
    }
    found
}

/// Lists the anchors of a page's headings, as mdBook makes them.
fn headings(text: &str) -> BTreeSet<String> {
    let mut anchors = BTreeSet::new();
    let mut fenced = false;
    for line in text.lines() {
        fenced ^= line.trim_start().starts_with("```");
        if !fenced && line.starts_with('#') {
            anchors.insert(anchor(line.trim_start_matches('#').trim()));
        }
    }
    anchors
}

/// Returns the anchor of a heading: lower case, spaces as dashes, and nothing but letters, digits,
/// dashes and underscores.
fn anchor(heading: &str) -> String {
    let lower = heading.to_lowercase();
    let kept = lower
        .chars()
        .filter(|c| c.is_alphanumeric() || [' ', '-', '_'].contains(c));
    kept.map(|c| if c == ' ' { '-' } else { c }).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn page(name: &str, text: &str) -> Page {
        Page {
            name: name.to_owned(),
            text: text.to_owned(),
        }
    }

    #[test]
    fn links_to_pages_and_headings_are_followed() {
        let pages = [
            page("SUMMARY.md", "- [A](a.md)\n- [B](deep/b.md)"),
            page(
                "a.md",
                "# A thing, or two\n[b](deep/b.md#more-code) `[no](link.md)`\n```\n[no](x.md)\n```\n",
            ),
            page("deep/b.md", "## More `code`\n[a](../a.md#a-thing-or-two)"),
        ];
        assert_eq!(check(&pages, Path::new("none")), Vec::<String>::new());
    }

    #[test]
    fn a_link_that_leads_nowhere_is_told() {
        let pages = [
            page("SUMMARY.md", "[A](a.md)"),
            page("a.md", "[x](none.md) [y](a.md#none) ![z](p.svg)"),
            page("lost.md", ""),
        ];
        assert_eq!(check(&pages, Path::new("none")).len(), 4);
    }
}
