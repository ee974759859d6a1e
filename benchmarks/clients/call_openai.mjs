// OpenAI's client for Node: chats and responses, with zod.
import OpenAI from 'openai'
import { zodFunction, zodResponseFormat, zodResponsesFunction, zodTextFormat } from 'openai/helpers/zod'
import { toJSONSchema } from 'zod'
import {
  ADDRESS, AGAIN, ASK, DESCRIPTIONS, FUNCTIONS, GetWeather, HELLO, KEY, MODEL, PLAN, RESULT, SECONDS, TOKENS, Trip, expect,
  run, text, validated,
} from './calls.mjs'

const client = new OpenAI({ baseURL: `${ADDRESS}/v1`, apiKey: KEY, maxRetries: 0, timeout: SECONDS * 1000 })
const chats = client.chat.completions
const CHAT = { model: MODEL, temperature: 0, max_completion_tokens: TOKENS }
const RESPONSE = { model: MODEL, temperature: 0, max_output_tokens: TOKENS }
const user = (content) => [{ role: 'user', content }]
const names = Object.keys(FUNCTIONS)
const plainTools = names.map((name) => ({
  type: 'function',
  function: { name, description: DESCRIPTIONS[name], parameters: toJSONSchema(FUNCTIONS[name]) },
}))
const zodTools = names.map((name) =>
  zodFunction({ name, description: DESCRIPTIONS[name], parameters: FUNCTIONS[name] }))
const responseTools = names.map((name) =>
  zodResponsesFunction({ name, description: DESCRIPTIONS[name], parameters: FUNCTIONS[name] }))

/** An answer that must be calls. */
function called(choice, fits = true) {
  const calls = choice.message.tool_calls ?? []
  expect(calls.length, `no call but ${choice.message.content} (${choice.finish_reason})`)
  for (const one of calls) validated(one.function.name, one.function.arguments, fits)
  expect(choice.finish_reason === 'tool_calls' || choice.finish_reason === 'stop', choice.finish_reason)
  return 'call'
}

function calledOrSaid(choice, fits = false) {
  return choice.message.tool_calls?.length ? called(choice, fits) : text(choice.message.content)
}

function responseCalled(found, fits = true) {
  const calls = found.output.filter((item) => item.type === 'function_call')
  for (const one of calls) validated(one.name, one.arguments, fits)
  return calls.length ? 'call' : text(found.output_text)
}

async function refused(call, field) {
  try {
    await call()
  } catch (error) {
    expect(error instanceof OpenAI.BadRequestError && error.param === field, `${error.name} ${error.param}: ${error}`)
    return 'error'
  }
  throw new Error(`${field} was accepted`)
}

await run({
  chat: async () => text((await chats.create({ ...CHAT, messages: user(HELLO) })).choices[0].message.content),
  'chat, streamed, with usage': async () => {
    const given = { messages: user(HELLO), stream: true, stream_options: { include_usage: true } }
    let said = ''
    let usage
    for await (const chunk of await chats.create({ ...CHAT, ...given })) {
      said += chunk.choices[0]?.delta.content ?? ''
      usage = chunk.usage ?? usage
    }
    expect(usage?.completion_tokens > 0, { usage })
    return text(said)
  },
  'tools, auto': async () =>
    calledOrSaid((await chats.create({ ...CHAT, messages: AGAIN, tools: plainTools })).choices[0]),
  'tools, required': async () => {
    const given = { messages: user(ASK), tools: plainTools, tool_choice: 'required', parallel_tool_calls: false }
    return called((await chats.create({ ...CHAT, ...given })).choices[0])
  },
  'tools, named': async () => {
    const choice = { type: 'function', function: { name: 'get_weather' } }
    const given = { messages: user(ASK), tools: plainTools, tool_choice: choice }
    return called((await chats.create({ ...CHAT, ...given })).choices[0])
  },
  'tools, strict, auto (zodFunction)': async () =>
    calledOrSaid((await chats.create({ ...CHAT, messages: AGAIN, tools: zodTools })).choices[0], true),
  'tools, parse (zodFunction)': async () => {
    const given = { messages: user(ASK), tools: zodTools, tool_choice: 'required', parallel_tool_calls: false }
    const choice = (await chats.parse({ ...CHAT, ...given })).choices[0]
    expect(choice.message.tool_calls?.length === 1 && choice.message.tool_calls[0].function.parsed_arguments, choice)
    return called(choice)
  },
  'tools, parallel': async () => {
    const given = { messages: user(ASK), tools: zodTools, tool_choice: 'required', parallel_tool_calls: true }
    const choice = (await chats.create({ ...CHAT, ...given })).choices[0]
    if (choice.finish_reason === 'length') { // a small model may call again and again, until the last call is cut off
      choice.message.tool_calls.pop()
      expect(choice.message.tool_calls.length > 1, choice)
      choice.finish_reason = 'tool_calls'
    }
    return called(choice)
  },
  'tools, streamed, strict, auto (chat.completions.stream)': async () => {
    const stream = chats.stream({ ...CHAT, messages: AGAIN, tools: zodTools })
    return calledOrSaid((await stream.finalChatCompletion()).choices[0], true)
  },
  'tools, streamed, required (chat.completions.stream)': async () => {
    const stream = chats.stream({
      ...CHAT, messages: user(ASK), tools: plainTools, tool_choice: 'required', parallel_tool_calls: false,
    })
    let parts = 0
    for await (const chunk of stream) parts += chunk.choices[0]?.delta.tool_calls?.length ?? 0
    expect(parts > 1, `${parts} parts of calls`)
    return called((await stream.finalChatCompletion()).choices[0])
  },
  'tool loop': async () => {
    const given = { tools: plainTools, tool_choice: 'required', parallel_tool_calls: false }
    const { message } = (await chats.create({ ...CHAT, messages: user(ASK), ...given })).choices[0]
    const result = { role: 'tool', tool_call_id: message.tool_calls[0].id, content: RESULT }
    const messages = [...user(ASK), message, result]
    return calledOrSaid((await chats.create({ ...CHAT, messages, tools: plainTools })).choices[0])
  },
  'tool loop (runTools, zodFunction)': async () => {
    const tool = zodFunction({
      name: 'get_weather', description: DESCRIPTIONS.get_weather, parameters: GetWeather,
      function: ({ city }) => `${city}: ${RESULT}`,
    })
    const runner = chats.runTools({ ...CHAT, messages: user(ASK), tools: [tool] }, { maxChatCompletions: 3 })
    await runner.done()
    const last = runner.messages.at(-1)
    return runner.messages.length > 2 || last.tool_calls?.length ? 'call' : text(last.content)
  },
  'structured output (chat.completions.parse, zodResponseFormat)': async () => {
    const given = { messages: user(PLAN), response_format: zodResponseFormat(Trip, 'trip') }
    const { message } = (await chats.parse({ ...CHAT, ...given })).choices[0]
    Trip.parse(message.parsed)
    return 'parsed'
  },
  'structured output, streamed': async () => {
    const given = { messages: user(PLAN), response_format: zodResponseFormat(Trip, 'trip') }
    const { message } = (await chats.stream({ ...CHAT, ...given }).finalChatCompletion()).choices[0]
    Trip.parse(message.parsed)
    return 'parsed'
  },
  'tools with structured output': async () => {
    const given = { messages: user(ASK), tools: zodTools, response_format: zodResponseFormat(Trip, 'trip') }
    const choice = (await chats.parse({ ...CHAT, ...given })).choices[0]
    if (choice.message.tool_calls?.length) return called(choice)
    Trip.parse(choice.message.parsed)
    return 'parsed'
  },
  'error names the field': () => refused(() => chats.create({ ...CHAT, messages: user(HELLO), colour: 1 }), 'colour'),
  response: async () => text((await client.responses.create({ ...RESPONSE, input: HELLO })).output_text),
  'response, streamed, with usage': async () => {
    let last
    let said = ''
    for await (const event of await client.responses.create({ ...RESPONSE, input: HELLO, stream: true })) {
      if (event.type === 'response.output_text.delta') said += event.delta
      last = event
    }
    expect(last.response?.usage?.output_tokens > 0, last)
    return text(said)
  },
  'response, tools, strict, auto (zodResponsesFunction)': async () =>
    responseCalled(await client.responses.create({ ...RESPONSE, input: ASK, tools: responseTools })),
  'response, tools, parse, required': async () => {
    const given = { input: ASK, tools: responseTools, tool_choice: 'required', parallel_tool_calls: false }
    const found = await client.responses.parse({ ...RESPONSE, ...given })
    const calls = found.output.filter((item) => item.type === 'function_call')
    expect(calls.length === 1 && calls[0].parsed_arguments, found.output)
    return responseCalled(found)
  },
  'response, tool loop (items go back)': async () => {
    const given = { tools: responseTools, parallel_tool_calls: false, store: false }
    const first = await client.responses.parse({ ...RESPONSE, input: ASK, tool_choice: 'required', ...given })
    const items = [...user(ASK), ...first.output]
    for (const item of first.output)
      if (item.type === 'function_call')
        items.push({ type: 'function_call_output', call_id: item.call_id, output: RESULT })
    return responseCalled(await client.responses.create({ ...RESPONSE, input: items, ...given }))
  },
  'response, structured output (responses.parse, zodTextFormat)': async () => {
    const given = { input: PLAN, text: { format: zodTextFormat(Trip, 'trip') } }
    Trip.parse((await client.responses.parse({ ...RESPONSE, ...given })).output_parsed)
    return 'parsed'
  },
  'response, structured output, streamed': async () => {
    const given = { input: PLAN, text: { format: zodTextFormat(Trip, 'trip') } }
    const stream = client.responses.stream({ ...RESPONSE, ...given })
    for await (const event of stream) expect(event.type, event)
    Trip.parse((await stream.finalResponse()).output_parsed)
    return 'parsed'
  },
  'response, tools with structured output': async () => {
    const given = { input: ASK, tools: responseTools, text: { format: zodTextFormat(Trip, 'trip') } }
    const found = await client.responses.parse({ ...RESPONSE, ...given })
    if (found.output.some((item) => item.type === 'function_call')) return responseCalled(found)
    Trip.parse(found.output_parsed)
    return 'parsed'
  },
  'response, error names the field': () =>
    refused(() => client.responses.create({ ...RESPONSE, input: HELLO, colour: 1 }), 'colour'),
})
