//! Durations in JSON: seconds, as a number. The form of earlier versions (`{"secs": 10, "nanos": 0}`) is also accepted.

use std::time::Duration;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// Either form.
#[derive(Deserialize)]
#[serde(untagged)]
enum Form {
    Seconds(f64),
    Parts(Duration),
}

impl Form {
    fn read<E: serde::de::Error>(self) -> Result<Duration, E> {
        match self {
            Form::Seconds(seconds) => Duration::try_from_secs_f64(seconds).map_err(E::custom),
            Form::Parts(duration) => Ok(duration),
        }
    }
}

/// For `#[serde(with)]` on a [`Duration`].
pub fn serialize<S: Serializer>(duration: &Duration, serializer: S) -> Result<S::Ok, S::Error> {
    serializer.serialize_f64(duration.as_secs_f64())
}

/// For `#[serde(with)]` on a [`Duration`].
pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    Form::deserialize(deserializer)?.read()
}

/// For `#[serde(with)]` on an `Option<Duration>`.
pub mod option {
    use super::{Deserialize, Deserializer, Duration, Form, Serialize, Serializer};

    /// As [`super::serialize`].
    pub fn serialize<S: Serializer>(duration: &Option<Duration>, serializer: S) -> Result<S::Ok, S::Error> {
        duration.map(|duration| duration.as_secs_f64()).serialize(serializer)
    }

    /// As [`super::deserialize`].
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
        Option::<Form>::deserialize(deserializer)?.map(Form::read).transpose()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use std::time::Duration;

    use crate::Workload;

    #[test]
    fn times_are_seconds_and_the_former_form_is_read() {
        let workload = Workload { warmup: Duration::from_millis(1500), ..Workload::default() };
        let json = serde_json::to_value(&workload).unwrap();
        assert_eq!((&json["runtime_seconds"], &json["warmup_seconds"]), (&10.0.into(), &1.5.into()));
        assert_eq!(serde_json::from_value::<Workload>(json).unwrap(), workload);
        let former = r#"{"runtime":{"secs":10,"nanos":0},"warmup":{"secs":1,"nanos":500000000}}"#;
        assert_eq!(serde_json::from_str::<Workload>(former).unwrap(), workload);
        assert_eq!(serde_json::from_str::<Workload>(r#"{"runtime":null}"#).unwrap().runtime, None);
        assert!(serde_json::from_str::<Workload>(r#"{"runtime_seconds":-1}"#).is_err());
    }
}
