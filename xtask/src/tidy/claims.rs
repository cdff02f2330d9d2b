//! Pages that make a claim name its test as `module::name_of_the_test`: checks that each such test exists.

use crate::workspace::Workspace;

/// Decisions are not edited, even if a test that they name is renamed.
const DECISIONS: &str = "docs/adr/";
/// A page with tables in which the last column of each row must name a test.
const PROVEN: &str = "docs/security.md";
/// Those tables, by the beginnings of their heads.
const PROVEN_TABLES: &[&str] = &["| from |", "| part |", "| threat |"];

/// Checks all pages except decisions.
///
/// # Errors
/// A file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let (mut pages, mut sources) = (Vec::new(), Vec::new());
    for file in workspace.files(".")? {
        let texts = match file.rsplit_once('.') {
            Some((_, "md")) if !file.starts_with(DECISIONS) => &mut pages,
            Some((_, "rs")) => &mut sources,
            Some(_) | None => continue,
        };
        let text = workspace.text(&file)?.unwrap_or_default();
        texts.push((file, text));
    }
    let mut findings = Vec::new();
    for (page, text) in &pages {
        for (number, line) in text.lines().enumerate() {
            for name in names(line).filter(|name| !is_there(name, &sources)) {
                findings.push(format!("{page}:{}: no test is named `{name}`", number + 1));
            }
        }
        if page == PROVEN {
            for table in PROVEN_TABLES {
                findings.extend(unproven(page, text, table));
            }
        }
    }
    Ok(findings)
}

/// Words in backticks that name a test: a path whose last part is a sentence.
fn names(line: &str) -> impl Iterator<Item = &str> {
    let quoted = line.split('`').skip(1).step_by(2);
    quoted.filter(|word| {
        let plain = |c: char| c.is_ascii_lowercase() || c.is_ascii_digit() || c == '_' || c == ':';
        let last = word.rsplit("::").next().unwrap_or_default();
        word.contains("::") && word.chars().all(plain) && last.matches('_').count() >= 2
    })
}

/// Whether a source of that module has this function. A module is a file, a folder, or inline in a file.
fn is_there(name: &str, sources: &[(String, String)]) -> bool {
    let mut parts = name.rsplit("::");
    let function = format!("fn {}(", parts.next().unwrap_or_default());
    let module = parts.next().unwrap_or_default();
    let inline = format!("mod {module}");
    sources.iter().any(|(file, text)| {
        let here = file.split(['/', '.']).any(|part| part == module) || text.contains(&inline);
        here && text.contains(&function)
    })
}

/// Rows of a table whose last column names no test, or a finding that the table is missing.
fn unproven(page: &str, text: &str, table: &str) -> Vec<String> {
    let mut rows = text
        .lines()
        .enumerate()
        .skip_while(|(_, line)| !line.starts_with(table))
        .take_while(|(_, line)| line.starts_with('|'))
        .skip(2)
        .peekable();
    if rows.peek().is_none() {
        return vec![format!("{page}: no table begins with `{table}`")];
    }
    rows.filter(|(_, row)| names(last_cell(row)).next().is_none())
        .map(|(number, _)| format!("{page}:{}: a claim without its test", number + 1))
        .collect()
}

/// The last cell of a row.
fn last_cell(row: &str) -> &str {
    let row = row.trim_end();
    let row = row.strip_suffix('|').unwrap_or(row);
    row.rsplit('|').next().unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const GOOD: &str = "| a | b | c | core `one::a_test_that_is_there` |\n";

    /// A page with each of the tables, of these rows.
    fn page(rows: [&str; 3]) -> String {
        let mut page = "# T\n".to_owned();
        for (head, row) in PROVEN_TABLES.iter().zip(rows) {
            page += &format!("\n{head} b | c | test |\n| --- | --- | --- | --- |\n{row}");
        }
        page
    }

    fn found(page: &str) -> Vec<String> {
        let (_folder, workspace) = sample(&[
            ("docs/security.md", page),
            ("core/tests/one.rs", "//! T\nfn a_test_that_is_there() {}\n"),
            ("core/tests/two.rs", "//! T\nfn a_test_that_is_not() {}\n"),
        ]);
        check(&workspace).unwrap()
    }

    #[test]
    fn a_claim_without_a_test_is_found_in_each_table() {
        assert_eq!(found(&page([GOOD; 3])), Vec::<String>::new());
        // Named elsewhere in the row, it proves nothing.
        for bad in [
            "| a | b | c | |\n",
            "| a `one::a_test_that_is_there` | b | c | d |\n",
        ] {
            for table in 0..3 {
                let mut rows = [GOOD; 3];
                rows[table] = bad;
                let line = 5 + 4 * table;
                let finding = format!("docs/security.md:{line}: a claim without its test");
                assert_eq!(found(&page(rows)), [finding]);
            }
        }
    }

    #[test]
    fn a_missing_test_is_reported() {
        let bad = "| a | b | c | `one::a_test_that_is_not` |\n";
        assert_eq!(
            found(&page([GOOD, bad, GOOD])),
            ["docs/security.md:9: no test is named `one::a_test_that_is_not`"]
        );
    }

    #[test]
    fn test_names_are_checked_on_all_pages_except_decisions() {
        let text = "# T\n\nAs `one::a_test_that_is_there` and `one::a_test_that_is_not` show.\n";
        let (_folder, workspace) = sample(&[
            ("README.md", text),
            ("docs/adr/0001-t.md", text),
            ("core/tests/one.rs", "//! T\nfn a_test_that_is_there() {}\n"),
        ]);
        assert_eq!(
            check(&workspace).unwrap(),
            ["README.md:3: no test is named `one::a_test_that_is_not`"]
        );
    }

    #[test]
    fn a_missing_table_is_reported() {
        let without = page([GOOD; 3]).replace("| part |", "| piece |");
        assert_eq!(
            found(&without),
            ["docs/security.md: no table begins with `| part |`"]
        );
    }
}
