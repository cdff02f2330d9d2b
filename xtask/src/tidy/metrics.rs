//! Every metric of our own is documented for operators. Upstream's keep upstream's names, labels and buckets, which the document
//! says once for all of them.

use std::collections::BTreeMap;

use anyhow::anyhow;
use proc_macro2::{TokenStream, TokenTree};

use crate::tidy::documents::first_column;
use crate::workspace::Workspace;

const DOCUMENT: &str = "docs/operations.md";
/// Its table of metrics, by how the head begins.
const TABLE: &str = "| metric | type |";
/// Where families are declared.
const FOLDER: &str = "tunnel-daemon/src/telemetry/";
/// What declares one, as the sources call it: `families.counter("name", "help")`.
const REGISTRARS: &[&str] = &["families", "registrar"];
/// Files there with families of our own, and the prefix that theirs have.
const OURS: &[(&str, &str)] = &[
    ("failed_dials.rs", "adit_"),
    ("metrics_account.rs", "adit_ebpf_"),
    ("metrics_adit.rs", "adit_"),
    ("metrics_node.rs", "adit_"),
    ("metrics_redirect.rs", "adit_"),
    ("metrics_review.rs", "adit_"),
    ("tunnels.rs", "adit_"),
    ("versions.rs", "adit_"),
];
/// Files there with upstream's.
const UPSTREAMS: &[&str] = &[
    "metrics_agent.rs",
    "metrics_lease.rs",
    "metrics_server.rs",
    "packets.rs",
];

/// Compares the declared families with the document, both ways.
///
/// # Errors
/// When a file cannot be read or parsed.
pub(super) fn check(workspace: &Workspace) -> anyhow::Result<Vec<String>> {
    let mut findings = Vec::new();
    let mut declared = BTreeMap::new();
    for file in workspace.files(FOLDER)? {
        let name = file.strip_prefix(FOLDER).unwrap_or(&file);
        if !name.ends_with(".rs") || UPSTREAMS.contains(&name) {
            continue;
        }
        let source = workspace.text(&file)?.unwrap_or_default();
        let stream: TokenStream = source.parse().map_err(|error| anyhow!("{file}: {error}"))?;
        let mut families = Vec::new();
        declared_families(stream, &mut families);
        let Some((_, prefix)) = OURS.iter().find(|(ours, _)| *ours == name) else {
            if !families.is_empty() {
                findings.push(format!(
                    "{file}: it declares metrics, but is in no list of xtask/src/tidy/metrics.rs"
                ));
            }
            continue;
        };
        if families.is_empty() {
            findings.push(format!(
                "{file}: listed in OURS of xtask/src/tidy/metrics.rs, but declares no metric"
            ));
        }
        let named = families.into_iter().map(|name| format!("{prefix}{name}"));
        declared.extend(named.map(|family| (family, file.clone())));
    }
    let rows = first_column(&workspace.text(DOCUMENT)?.unwrap_or_default(), TABLE);
    let missing = declared
        .iter()
        .filter(|(family, _)| !rows.contains(family))
        .map(|(family, file)| format!("{file}: `{family}` has no row in {DOCUMENT}"));
    let stale = rows
        .iter()
        .filter(|family| !declared.contains_key(*family))
        .map(|family| {
            format!("{DOCUMENT}: `{family}` is documented, but no such metric is declared")
        });
    findings.extend(missing.chain(stale));
    Ok(findings)
}

/// Names in `families.counter("name", ...)`, whatever is declared.
fn declared_families(stream: TokenStream, found: &mut Vec<String>) {
    let tokens: Vec<TokenTree> = stream.into_iter().collect();
    for call in tokens.windows(4) {
        if let [
            TokenTree::Ident(registrar),
            TokenTree::Punct(dot),
            TokenTree::Ident(_),
            TokenTree::Group(args),
        ] = call
            && REGISTRARS.iter().any(|known| *registrar == known)
            && dot.as_char() == '.'
            && let Some(TokenTree::Literal(name)) = args.stream().into_iter().next()
        {
            found.push(name.to_string().trim_matches('"').to_owned());
        }
    }
    for token in tokens {
        if let TokenTree::Group(group) = token {
            declared_families(group.stream(), found);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::tidy::sample;

    const SOURCE: &str = "fn register(families: &Registrar<'_>) -> Self { let all = families.counter(\"all_total\", \"All\");\n\
                          Self(Arc::new(Inner { by_kind: families\n.gauges_from_zero(\"by_kind\", \"Some\", \"kind\"), all })) }";

    #[test]
    fn undocumented_and_stale_metrics_are_found() {
        let text = "| `adit_by_kind{kind=\"a\"}` grows | why |\n\n| metric | type | says |\n| --- | --- | --- |\n\
                    | `adit_all_total`, `adit_gone` | counter | `all` |\n\n| `adit_by_kind` |\n";
        let (_folder, workspace) = sample(&[
            ("tunnel-daemon/src/telemetry/metrics_adit.rs", SOURCE),
            ("tunnel-daemon/src/telemetry/metrics_server.rs", SOURCE),
            (DOCUMENT, text),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(findings.len(), 2, "{findings:?}");
        for part in [
            "metrics_adit.rs: `adit_by_kind` has no row",
            "`adit_gone` is documented",
        ] {
            let found = findings.iter().any(|finding| finding.contains(part));
            assert!(found, "{part}: {findings:?}");
        }
    }

    #[test]
    fn a_file_whose_prefix_is_not_known_is_a_finding() {
        let (_folder, workspace) = sample(&[
            ("tunnel-daemon/src/telemetry/metrics_new.rs", SOURCE),
            (DOCUMENT, "# Operations\n"),
        ]);
        let findings = check(&workspace).unwrap();
        assert_eq!(findings.len(), 1, "{findings:?}");
        assert!(findings.iter().all(|finding| finding.contains("no list")));
    }
}
