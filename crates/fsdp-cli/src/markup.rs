//! Parts of pages: escaped text, and a page that needs nothing but itself.

use crate::text::escaped;

/// The colours and fonts of pages and pictures, in light and dark.
pub(crate) const STYLE: &str = "\
:root{--ink:#1b1f24;--soft:#57606a;--line:#d0d7de;--paper:#ffffff;--one:#1f5fa8;--bad:#b42318}
@media (prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa4ae;--line:#3a424b;--paper:#14181d;--one:#6cb0ff;--bad:#ff8a80}}
body{margin:2rem auto;max-width:62rem;padding:0 1rem;background:var(--paper);color:var(--ink);font:15px/1.5 system-ui,sans-serif}
h1{font-size:1.5rem}h2{font-size:1.15rem;margin-top:2rem}
table{border-collapse:collapse;font-variant-numeric:tabular-nums}
th,td{text-align:left;padding:.2rem .9rem .2rem 0;border-bottom:1px solid var(--line);vertical-align:top}
td.number,th.number{text-align:right}
code{font:13px ui-monospace,monospace;overflow-wrap:anywhere}
.wide{overflow-x:auto}.bad{color:var(--bad)}.soft{color:var(--soft)}
svg{max-width:100%;height:auto;font:12px system-ui,sans-serif}
svg text{fill:var(--ink)}svg text.soft{fill:var(--soft)}svg .line{stroke:var(--line)}
svg .one{stroke:var(--one);fill:none;stroke-width:1.5}svg .band{fill:var(--one);opacity:.18}
svg .paper{fill:var(--paper)}svg .none{fill:none;stroke:var(--line)}svg .several{fill:var(--soft)}
";

/// Escapes text for HTML or SVG, also inside of quotes. Characters that are invisible or change the
/// direction of text are shown as codes.
pub(crate) fn escape(text: &str) -> String {
    let mut safe = String::with_capacity(text.len());
    // First what acts on a reader, such as text from right to left, then what acts on HTML.
    for character in escaped(text).chars() {
        match character {
            '&' => safe.push_str("&amp;"),
            '<' => safe.push_str("&lt;"),
            '>' => safe.push_str("&gt;"),
            '"' => safe.push_str("&quot;"),
            '\'' => safe.push_str("&#39;"),
            character => safe.push(character),
        }
    }
    safe
}

/// Returns a page that loads nothing: no script, no font, no picture of others. `title` is text,
/// `body` is HTML.
pub(crate) fn page(title: &str, body: &str) -> String {
    format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width, initial-scale=1\">\
         <meta name=\"color-scheme\" content=\"light dark\">\
         <meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">\
         <title>{}</title>\n<style>\n{STYLE}</style></head>\n<body>\n{body}</body></html>\n",
        escape(title)
    )
}

/// Shortens text in its middle to `max_characters` characters.
pub(crate) fn shortened(text: &str, max_characters: usize) -> String {
    let character_count = text.chars().count();
    if character_count <= max_characters {
        return text.to_owned();
    }
    let front: String = text.chars().take((max_characters - 1) / 2).collect();
    let back: String = text
        .chars()
        .skip(character_count - max_characters / 2)
        .collect();
    format!("{front}…{back}")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_cannot_leave_their_place_in_a_page() {
        assert_eq!(
            escape("a<b>&\"c'\u{202e}"),
            "a&lt;b&gt;&amp;&quot;c&#39;\\u{202e}"
        );
        let page = page("</title><script>", "");
        assert!(!page.contains("<script") && page.contains("&lt;script&gt;"));
    }

    #[test]
    fn long_names_keep_their_ends() {
        assert_eq!(shortened("abcdefghij", 5), "ab…ij");
        assert_eq!(shortened("abcde", 5), "abcde");
    }
}
