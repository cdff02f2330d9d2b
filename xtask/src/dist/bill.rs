//! The bill of materials: a CycloneDX document of what is linked into the binary, in these features and for this target.

use std::path::Path;

use serde_json::{Value, json};

use super::system::Library;
use super::tree::{Crate, Crates, Id, ROOT};
use super::{Arch, HOMEPAGE, REPOSITORY, Release};
use crate::workspace::sha256;

/// The version of the format.
const SPECIFICATION: &str = "1.5";

/// The document as JSON.
///
/// # Errors
/// The program cannot be read.
pub(super) fn of(
    release: &Release,
    arch: Arch,
    program: &Path,
    crates: &Crates,
    libraries: &[Library],
) -> anyhow::Result<String> {
    let is_root = |id: &Id| id.0 == ROOT;
    let mut components: Vec<Value> = crates
        .all
        .iter()
        .filter(|(id, _)| !is_root(id))
        .map(|(id, one)| component(id, one))
        .collect();
    components.extend(libraries.iter().map(|library| {
        json!({
            "type": "library",
            "bom-ref": library.purl,
            "name": library.name,
            "version": library.version,
            "purl": library.purl,
            "licenses": [{"expression": library.licence}],
        })
    }));
    let mut dependencies: Vec<Value> = crates
        .all
        .iter()
        .map(|(id, one)| {
            let mut uses: Vec<String> = one.uses.iter().map(purl).collect();
            if is_root(id) {
                uses.extend(libraries.iter().map(|library| library.purl.clone()));
            }
            json!({"ref": purl(id), "dependsOn": uses})
        })
        .collect();
    let leaves = libraries.iter().map(|library| json!({"ref": library.purl}));
    dependencies.extend(leaves);
    let document = json!({
        "bomFormat": "CycloneDX",
        "specVersion": SPECIFICATION,
        "version": 1,
        "metadata": {
            "timestamp": release.time,
            "component": {
                "type": "application",
                "bom-ref": format!("pkg:cargo/{ROOT}@{}", release.version),
                "name": ROOT,
                "version": release.version,
                "purl": format!("pkg:cargo/{ROOT}@{}", release.version),
                "licenses": [{"expression": "Apache-2.0"}],
                "hashes": [{"alg": "SHA-256", "content": sha256(program)?}],
                "externalReferences": [
                    {"type": "website", "url": HOMEPAGE},
                    {"type": "vcs", "url": REPOSITORY},
                ],
            },
            "properties": [
                {"name": "adit:commit", "value": release.revision},
                {"name": "adit:features", "value": crates.features.join(",")},
                {"name": "adit:target", "value": arch.triple()},
            ],
        },
        "components": components,
        "dependencies": dependencies,
    });
    Ok(format!("{document:#}\n"))
}

fn component(id: &Id, one: &Crate) -> Value {
    let mut component = json!({
        "type": "library",
        "bom-ref": purl(id),
        "name": id.0,
        "version": id.1,
        "purl": purl(id),
    });
    if let Some(licence) = &one.package.license {
        component["licenses"] = json!([{"expression": expression(licence)}]);
    }
    if let Some(checksum) = &one.checksum {
        component["hashes"] = json!([{"alg": "SHA-256", "content": checksum}]);
    }
    if let Some(text) = &one.package.description {
        component["description"] = json!(text.split_whitespace().collect::<Vec<_>>().join(" "));
    }
    if let Some(url) = &one.package.repository {
        component["externalReferences"] = json!([{"type": "vcs", "url": url}]);
    }
    component
}

fn purl((name, version): &Id) -> String {
    format!("pkg:cargo/{name}@{}", version.replace('+', "%2B"))
}

/// An SPDX expression, of one that may be of the time before cargo asked for SPDX.
fn expression(licence: &str) -> String {
    licence.replace(" / ", " OR ").replace('/', " OR ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn purls_and_licence_expressions_follow_their_specs() {
        let id = ("a".to_owned(), "1.0.0+b".to_owned());
        assert_eq!(purl(&id), "pkg:cargo/a@1.0.0%2Bb");
        assert_eq!(expression("MIT/Apache-2.0"), "MIT OR Apache-2.0");
    }
}
