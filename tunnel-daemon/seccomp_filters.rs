//! A seccomp profile of OCI runtimes as filters of the crate `seccompiler`. For tests and trials, each by its path.

use serde_json::{Value, json};

/// The filters that do what the profile says, in the order to apply; what is not listed ends in `otherwise`. A call that is refused
/// with an error of its own has a filter of its own: the kernel takes the sterner answer of all.
///
/// # Errors
/// What of the profile is not known here.
pub(crate) fn filters(profile: &Value, otherwise: &Value) -> Result<Vec<Value>, String> {
    let list = |value: &Value, what: &str| {
        let found = value.as_array().cloned();
        found.ok_or_else(|| format!("the profile has no {what}"))
    };
    let (mut listed, mut filters) = (Vec::new(), Vec::new());
    for rule in list(&profile["syscalls"], "rules")? {
        for name in list(&rule["names"], "names of calls")? {
            let mut call = json!({"syscall": name});
            if let Some(conditions) = rule["args"].as_array() {
                call["args"] = conditions.iter().map(condition).collect::<Result<_, _>>()?;
            }
            listed.push(call.clone());
            match rule["action"].as_str() {
                Some("SCMP_ACT_ALLOW") => (),
                Some("SCMP_ACT_ERRNO") => {
                    let errno = json!({"errno": rule["errnoRet"]});
                    filters.push(filter(&json!("allow"), &errno, vec![call]));
                }
                other => {
                    return Err(format!(
                        "the action {} is not known here",
                        other.unwrap_or("none")
                    ));
                }
            }
        }
    }
    filters.push(filter(otherwise, &json!("allow"), listed));
    Ok(filters)
}

fn filter(mismatch: &Value, matched: &Value, calls: Vec<Value>) -> Value {
    json!({"main": {"mismatch_action": mismatch, "match_action": matched, "filter": calls}})
}

/// A condition in the words of seccompiler.
fn condition(rule: &Value) -> Result<Value, String> {
    let (operator, value) = match rule["op"].as_str() {
        Some("SCMP_CMP_EQ") => (json!("eq"), &rule["value"]),
        Some("SCMP_CMP_MASKED_EQ") => (json!({"masked_eq": rule["value"]}), &rule["valueTwo"]),
        other => {
            return Err(format!(
                "the comparison {} is not known here",
                other.unwrap_or("none")
            ));
        }
    };
    Ok(json!({"index": rule["index"], "type": "dword", "op": operator, "val": value}))
}
