//! The page of kernels has the rows that the matrix has now: it was written by a run, and the matrix may have changed since.

use crate::vm;
use crate::workspace::Workspace;

/// Compares the page with the entries.
///
/// # Errors
/// When the page cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let page = workspace.text(vm::PAGE)?.unwrap_or_default();
    // A page from before runs said what they were made from is as old as that.
    if !vm::names_its_commit(&page) {
        return Ok(Vec::new());
    }
    Ok(differences(&vm::titles(&page), &vm::rows()))
}

fn differences(written: &[&str], rows: &[&str]) -> Vec<String> {
    let page = vm::PAGE;
    let missing = rows.iter().filter(|row| !written.contains(row));
    let stale = written.iter().filter(|row| !rows.contains(row));
    let mut findings: Vec<String> = missing
        .map(|row| format!("{page}: no row {row:?}: run `cargo xtask vm --all --write`"))
        .chain(stale.map(|row| {
            format!("{page}: row {row:?} is of no entry: run `cargo xtask vm --all --write`")
        }))
        .collect();
    if findings.is_empty() && written != rows {
        findings.push(format!(
            "{page}: its rows are not in the order of the entries, or stand twice"
        ));
    }
    findings
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    fn found(rows: &[&str]) -> Vec<String> {
        let mut page = "# Kernels\n\nText.\n\nMade from commit abc, with the eBPF object of SHA-256 `d`.\n\n| | 6.1 |\n| --- | --- |\n".to_owned();
        for row in rows {
            page += &format!("| {row} | 3 tests |\n");
        }
        page += "\nThe kernels:\n\n- `6.1`, TCG\n";
        let (_folder, workspace) = sample(&[(vm::PAGE, page.as_str())]);
        check(&workspace).unwrap()
    }

    #[test]
    fn a_page_that_does_not_name_its_commit_is_of_no_matrix() {
        let text = "# Kernels\n\n| | 6.1 |\n| --- | --- |\n| a row | 3 tests |\n";
        let (_folder, workspace) = sample(&[(vm::PAGE, text)]);
        assert_eq!(check(&workspace).unwrap(), Vec::<String>::new());
    }

    #[test]
    fn a_page_of_this_matrix_has_no_finding() {
        assert_eq!(found(&vm::rows()), Vec::<String>::new());
    }

    #[test]
    fn a_row_of_another_matrix_is_found_on_either_side() {
        let mut rows = vm::rows();
        let left_out = rows.pop().unwrap();
        let findings = found(&rows);
        assert!(
            matches!(&findings[..], [one] if one.contains(&format!("no row {left_out:?}"))),
            "{findings:?}"
        );
        rows.extend([left_out, "what nobody asks"]);
        let findings = found(&rows);
        assert!(
            matches!(&findings[..], [one] if one.contains("\"what nobody asks\" is of no entry")),
            "{findings:?}"
        );
    }

    #[test]
    fn other_orders_and_rows_that_stand_twice_are_found() {
        let mut rows = vm::rows();
        rows.swap(0, 1);
        assert_eq!(found(&rows).len(), 1);
        rows.swap(0, 1);
        rows.push(rows[0]);
        assert_eq!(found(&rows).len(), 1);
    }
}
