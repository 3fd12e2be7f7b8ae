//! Whether a device does right what all kernels rely on.

use ops::DeviceError;

use crate::{Binding, Constant, Device, Dispatch, kernels::kernel};

fn inline<B>(words: &[u32]) -> Binding<B> {
    Binding::Inline(words.iter().flat_map(|w| w.to_le_bytes()).collect::<Vec<u8>>().into())
}

fn bytes(words: impl IntoIterator<Item = u32>) -> Vec<u8> {
    words.into_iter().flat_map(u32::to_le_bytes).collect()
}

/// Runs one small kernel a feature: barriers and threadgroup memory, sums and shuffles within a simdgroup, 8x8 matrices,
/// function constants, inline bytes, the order of dispatches.
///
/// # Errors
/// The device's own, and a sentence for a feature whose result is wrong.
pub fn run<D: Device>(device: &D) -> Result<(), DeviceError> {
    let wrong = |what: &str| {
        Err(DeviceError {
            backend: device.name(),
            reason: format!("self-test: {what} gives wrong results on {}", device.description()),
            refused: true,
        })
    };
    let upload = |data: &[u8]| -> Result<D::Buffer, DeviceError> {
        let buffer = device.allocate(data.len())?;
        device.write(&buffer, 0, data)?;
        Ok(buffer)
    };
    let read = |buffer: &D::Buffer, n: usize| -> Result<Vec<u32>, DeviceError> {
        let mut data = vec![0; 4 * n];
        device.read(buffer, 0, &mut data)?;
        Ok(data.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes"))).collect())
    };
    let dispatch =
        |name: &str, constants: &[(u32, Constant)], bindings, threadgroup, groups: u32, threads: u32| {
            let pipeline = device.pipeline(kernel(name), constants)?;
            let (groups, threads) = ([groups, 1, 1], [threads, 1, 1]);
            Ok::<_, DeviceError>(Dispatch::<D> {
                pipeline,
                bindings,
                threadgroup,
                groups,
                threads,
                barrier: true,
            })
        };
    let any = [(0, Constant::U32(1)), (1, Constant::Bool(false))];

    // 600 ones times 3, doubled, in three groups; then the sums of these sums.
    let ones = upload(&bytes([1f32.to_bits(); 600]))?;
    let (sums, total) = (device.allocate(12)?, device.allocate(4)?);
    let buffer = |b: &D::Buffer| Binding::Buffer(b.clone(), 0);
    let triple = [(0, Constant::U32(3)), (1, Constant::Bool(true))];
    device.submit(vec![
        dispatch(
            "selftest_sum",
            &triple,
            vec![buffer(&ones), buffer(&sums), inline(&[600])],
            vec![],
            3,
            256,
        )?,
        dispatch("selftest_sum", &any, vec![buffer(&sums), buffer(&total), inline(&[3])], vec![], 1, 256)?,
    ])?;
    let floats = |v: Vec<u32>| v.into_iter().map(f32::from_bits).collect::<Vec<f32>>();
    if floats(read(&sums, 3)?) != [1536.0, 1536.0, 528.0] {
        return wrong("a sum over a threadgroup");
    }
    if floats(read(&total, 1)?) != [3600.0] {
        return wrong("a dispatch that reads what the one before wrote");
    }

    let x = upload(&bytes(0..32))?;
    let y = device.allocate(128)?;
    device.submit(vec![dispatch(
        "selftest_exchange",
        &any,
        vec![buffer(&x), buffer(&y)],
        vec![128],
        1,
        32,
    )?])?;
    if read(&y, 32)? != (0..32).map(|l| 31 - (l + 1) % 32).collect::<Vec<u32>>() {
        return wrong("a shuffle within a simdgroup");
    }

    let matrix = |f: fn(u32) -> f32| upload(&bytes((0..64).map(|i| f(i).to_bits())));
    let (a, b, c) = (matrix(|i| i as f32)?, matrix(|i| (i % 7) as f32)?, matrix(|i| -(i as f32))?);
    device.submit(vec![dispatch(
        "selftest_matrix",
        &any,
        vec![buffer(&a), buffer(&b), buffer(&c)],
        vec![],
        1,
        32,
    )?])?;
    let want = |i: u32| {
        let (r, col) = (i / 8, i % 8);
        (0..8).map(|k| ((r * 8 + k) * ((k * 8 + col) % 7)) as f32).sum::<f32>() - i as f32
    };
    if floats(read(&c, 64)?) != (0..64).map(want).collect::<Vec<f32>>() {
        return wrong("a product of 8x8 matrices");
    }
    Ok(())
}
