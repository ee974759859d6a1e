// What the programs for Node share, as calls.py does for Python: calls are run in turn, one line of JSON for each.
import { z } from 'zod'

export const ADDRESS = process.env.CLIENTS_ADDRESS
export const MODEL = process.env.CLIENTS_MODEL
export const KEY = 'none'
export const SECONDS = 120
export const TOKENS = 300
const MESSAGE = 600

export const GetWeather = z.object({ city: z.string(), unit: z.enum(['celsius', 'fahrenheit']) })
export const GetTime = z.object({ city: z.string() })
export const Trip = z.object({
  city: z.enum(['Paris', 'London', 'Rome']),
  days: z.number().int(),
  packed: z.boolean(),
  guest: z.object({ name: z.string(), age: z.number().int() }),
})
export const FUNCTIONS = { get_weather: GetWeather, get_time: GetTime }
export const DESCRIPTIONS = { get_weather: 'Get the weather of a city.', get_time: 'Get the time of day in a city.' }
export const HELLO = 'Say hello.'
export const ASK = 'What is the weather in Paris, in celsius?'
export const PLAN = 'Plan a trip to Paris for John, who is 30. Answer in JSON.'
export const RESULT = '18 degrees, sunny'

/** A question, the call and its result. */
function turn(city) {
  const call = { name: 'get_weather', arguments: JSON.stringify({ city, unit: 'celsius' }) }
  return [
    { role: 'user', content: `What is the weather in ${city}, in celsius?` },
    { role: 'assistant', content: '', tool_calls: [{ id: `call_${city}`, type: 'function', function: call }] },
    { role: 'tool', tool_call_id: `call_${city}`, content: RESULT },
  ]
}
export const AGAIN = [...['London', 'Rome', 'Berlin'].flatMap(turn), { role: 'user', content: ASK }]

/** Raise where something does not hold, and say what came instead. */
export function expect(holds, what) {
  if (!holds) throw new Error(typeof what === 'string' ? what : JSON.stringify(what))
}

/** A text, which must not be empty. */
export function text(found) {
  expect(typeof found === 'string' && found.trim(), `no text but ${JSON.stringify(found)}`)
  return 'text'
}

/** The arguments of a call, checked; `fits`: against the function's schema. */
export function validated(name, given, fits = true) {
  expect(name in FUNCTIONS, `a call of ${name}`)
  const found = typeof given === 'string' ? JSON.parse(given) : given
  expect(found !== null && typeof found === 'object' && !Array.isArray(found), `arguments are ${given}`)
  if (fits) FUNCTIONS[name].strict().parse(found)
}

/** All calls in turn: name -> asynchronous function that returns what it got. */
export async function run(calls) {
  for (const [name, call] of Object.entries(calls)) {
    let line
    try {
      line = { call: name, result: await call(), ok: true, detail: '' }
    } catch (error) {
      const came = error.responseBody ?? error.text ?? ''
      const detail = `${error.name}: ${error.message} ${came}`.trim().slice(0, MESSAGE)
      line = { call: name, result: 'failed', ok: false, detail }
    }
    console.log(JSON.stringify(line))
  }
}
