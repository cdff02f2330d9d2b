//! Nothing of one person's machine is in the tree: no absolute path of a home or a checkout, no package
//! source other than the public one.

use crate::workspace::Workspace;

/// Folders people and machines work in, spelled so that this file does not contain them.
const HOMES: &[&str] = &[
    concat!("/ho", "me/"),
    concat!("/ro", "ot/"),
    concat!("/Us", "ers/"),
    concat!("/wo", "rk/"),
];

/// Settings that send package tools elsewhere.
const REDIRECTS: &[&str] = &[
    concat!("replace", "-with"),
    concat!("[regis", "tries"),
    concat!("arti", "factory"),
    concat!("index", "-url"),
    concat!("GOPROXY", "=http"),
];

/// The only package source a lock file may name.
const PUBLIC_SOURCE: &str = "registry+https://github.com/rust-lang/crates.io-index";

/// Checks all text files.
///
/// # Errors
/// When a file cannot be read.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut places: Vec<String> = HOMES.iter().map(|home| (*home).to_owned()).collect();
    // A checkout directly below `/` is named like folders of ours ("/src/"), so it proves nothing.
    let checkout = format!("{}/", workspace.root().display());
    if checkout.matches('/').count() > 2 {
        places.push(checkout);
    }
    let mut findings = Vec::new();
    for file in workspace.files(".")? {
        let Some(text) = workspace.text(&file)? else {
            continue;
        };
        let is_lock = file.ends_with("Cargo.lock");
        for (number, line) in text.lines().enumerate() {
            let foreign = is_lock && line.starts_with("source = ") && !line.contains(PUBLIC_SOURCE);
            let what = if foreign {
                Some("a package source that is not the public one")
            } else if places.iter().any(|place| names_path(line, place)) {
                Some("an absolute path of one machine")
            } else if REDIRECTS.iter().any(|setting| line.contains(setting)) {
                Some("a package registry of one machine")
            } else {
                None
            };
            findings.extend(what.map(|what| format!("{file}:{}: {what}", number + 1)));
        }
    }
    Ok(findings)
}

/// Whether the line names a path that begins with `place`; a longer path with `place` in the middle does not.
fn names_path(line: &str, place: &str) -> bool {
    line.match_indices(place).any(|(at, _)| {
        let before = line.get(..at).and_then(|text| text.chars().next_back());
        before.is_none_or(|c| !c.is_alphanumeric() && !"._-/{}*~$>".contains(c))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    #[test]
    fn absolute_path_of_a_machine_is_found() {
        for home in HOMES {
            assert!(names_path(&format!("see {home}me/notes"), home));
            assert!(names_path(&format!("\"{home}me\""), home));
            assert!(!names_path(&format!("net{home}x"), home));
            assert!(!names_path(&format!("$HOME{home}x"), home));
        }
    }

    #[test]
    fn private_package_source_is_found() {
        let lock = "[[package]]\nsource = \"registry+https://packages.example\"\n";
        let (_folder, workspace) = sample(&[("Cargo.lock", lock)]);
        assert_eq!(
            check(&workspace).unwrap(),
            ["Cargo.lock:2: a package source that is not the public one"]
        );
    }

    #[test]
    fn path_of_the_checkout_is_found() {
        let (folder, workspace) = sample(&[]);
        std::fs::write(
            folder.path().join("notes.txt"),
            format!("cd {}/docs", folder.path().display()),
        )
        .unwrap();
        assert_eq!(
            check(&workspace).unwrap(),
            ["notes.txt:1: an absolute path of one machine"]
        );
    }
}
